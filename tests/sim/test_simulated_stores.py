"""Stores in simulated clusters: what they save, what they lose, what is copied between them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, Stores, WorkerGroup
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Prefixes, Workload

BLOCK = 64
MODEL = latency_source("roofline:llama-3-8b@h100").model(None, 1, 1)


def workload(num: int = 120, num_documents: int = 12, num_blocks: int = 60) -> Workload:
    """Questions about documents: long common beginnings, a block of their own at the end."""
    rng = np.random.default_rng(1)
    documents = rng.integers(num_documents, size=num)
    ids = [[*range(1000 * one, 1000 * one + num_blocks), 10**6 + n] for n, one in enumerate(documents.tolist())]
    offsets = np.arange(num + 1, dtype=np.int64) * (num_blocks + 1)
    prefixes = Prefixes(BLOCK, np.concatenate([np.array(one, np.int64) for one in ids]), offsets)
    prompts = np.full(num, (num_blocks + 1) * BLOCK + 7, dtype=np.int64)
    return Workload(np.arange(num, dtype=np.float64) * 0.2, prompts, np.full(num, 8, dtype=np.int64), prefixes)


def cluster(stores: Stores) -> ClusterSpec:
    """Prefill workers that remember three prompts each, and a decode worker that remembers none."""
    prefill = WorkerGroup("prefill", 4, MODEL, kv_tokens=3 * 62 * BLOCK)
    groups = (prefill, WorkerGroup("decode", 1, MODEL, prefix_cache=False))
    return ClusterSpec(groups, Network(), stores=stores)


def mean_ttft_s(result: SimResult) -> float:
    return float(np.mean(result.ttft_s))


def test_stores_save_computing_what_no_worker_has_any_more() -> None:
    load = workload()
    without, with_stores = (simulate(cluster(stores), load) for stores in (Stores(), Stores(4, 1 << 16)))
    assert mean_ttft_s(with_stores) < 0.8 * mean_ttft_s(without)


def test_several_stores_are_about_as_good_as_one_of_their_size() -> None:
    load = workload()
    four, one = (simulate(cluster(stores), load) for stores in (Stores(4, 1 << 14), Stores(1, 1 << 16)))
    assert mean_ttft_s(four) < 1.1 * mean_ttft_s(one)


def test_a_slow_disk_is_slower_than_memory() -> None:
    load = workload()
    fast = Stores(2, 1 << 16)
    slow = replace(fast, memory_tokens=BLOCK, disk_bytes_per_s=1e8)
    assert mean_ttft_s(simulate(cluster(fast), load)) < mean_ttft_s(simulate(cluster(slow), load))


def test_the_same_run_twice_gives_the_same_times() -> None:
    spec, load = cluster(Stores(3, 1 << 13)), workload()
    assert np.array_equal(simulate(spec, load).ttft_s, simulate(spec, load).ttft_s)


def test_a_store_gives_up_the_end_of_what_was_used_least() -> None:
    store = SimStore(0, 9, max_blocks=4, memory_blocks=2)
    assert store.put([1, 2, 3], 0.0) == ([1, 2, 3], [])
    assert store.find([1, 2, 7], 1.0) == {1, 2}
    stored, evicted = store.put([5, 6], 2.0)
    assert (stored, evicted) == ([5, 6], [3])
    assert store.room_idle_s(3.0) == pytest.approx(1.0)
    assert store.num_on_disk([1]) == 1, "the newest blocks took the memory"
    assert store.num_on_disk([1]) == 0
