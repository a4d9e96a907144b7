"""Stores in simulated clusters: what they save, what they lose, what is copied between them, or between workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.catalog.entry import Tier
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Failure, Network, Stores, WorkerGroup
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.kv_memory import KvMemory
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


def test_a_disk_is_worth_its_speed_and_hardly_ever_less_than_nothing() -> None:
    """Memory of a few blocks before a disk that has them all: workers compute what they load too slowly."""
    load = workload()
    slow = Stores(2, 4 * BLOCK, disk_tokens=1 << 16, disk_bytes_per_s=2e8)
    disks = slow, replace(slow, disk_bytes_per_s=4e9)
    without_s, slow_s, fast_s, memory_s = (
        mean_ttft_s(simulate(cluster(stores), load)) for stores in (Stores(), *disks, Stores(2, 1 << 16))
    )
    assert memory_s < fast_s < slow_s < 1.1 * without_s
    assert fast_s < 0.95 * without_s


def test_a_colder_tier_keeps_what_faster_ones_have_no_room_for() -> None:
    load = workload()
    disk = Stores(2, 4 * BLOCK, disk_tokens=40 * BLOCK, disk_bytes_per_s=1e10)
    cold = replace(disk, cold_tokens=1 << 16, cold_bytes_per_s=1e10, cold_latency_s=1e-4)
    assert mean_ttft_s(simulate(cluster(cold), load)) < 0.9 * mean_ttft_s(simulate(cluster(disk), load))


def test_what_stores_forget_is_computed_again() -> None:
    load, stores = workload(), Stores(4, 1 << 16)
    forgetful = replace(stores, ttl_s=0.1)
    assert mean_ttft_s(simulate(cluster(stores), load)) < 0.9 * mean_ttft_s(simulate(cluster(forgetful), load))


def test_the_same_run_twice_gives_the_same_times() -> None:
    spec, load = cluster(Stores(3, 1 << 13)), workload()
    assert np.array_equal(simulate(spec, load).ttft_s, simulate(spec, load).ttft_s)


def free(depth: int) -> float:
    """What a block costs to compute, where that is not looked at."""
    return 1.0


def test_a_store_gives_up_the_end_of_what_was_used_least() -> None:
    store = SimStore(0, 9, Stores(1, 4 * BLOCK), BLOCK)
    store.put([1, 2, 3], [1, 2, 3], free, 0.0)
    assert store.take_changes() == ((1, 2, 3), ())
    assert store.find([1, 2, 7], 1.0) == {1, 2}
    store.put([5, 6], [5, 6], free, 2.0)
    assert store.take_changes() == ((5, 6), (3,))
    assert store.room_idle_s(3.0) == pytest.approx(2.0), "what was used twice has aged"


def test_what_memory_gives_up_is_on_disk_once_it_was_copied() -> None:
    store = SimStore(0, 9, Stores(1, 2 * BLOCK, disk_tokens=9 * BLOCK), BLOCK)
    store.put([1, 2], [1, 2], free, 0.0)
    while copies := store.next_copies(Tier.DISK):
        store.copied(Tier.DISK, copies)
    store.put([5, 6], [5, 6], free, 1.0)
    assert store.take_changes() == ((1, 2, 5, 6), ())
    assert store.tiers_of([1, 2, 5, 6]) == {Tier.DISK: 2, Tier.DRAM: 2}
    store.read([1])
    assert store.tiers_of([1]) == {Tier.DRAM: 1}
    store.put([7, 8], [7, 8], free, 2.0)
    assert 6 in store.take_changes().evicted, "it was not copied in time"


def test_blocks_expire_and_copies_cool_down() -> None:
    store = SimStore(0, 9, Stores(1, 9 * BLOCK, ttl_s=50.0, replica_cool_s=10.0), BLOCK)
    store.put([1, 2], [1], free, 0.0)
    store.put([1, 2], [1, 2], free, 0.0, is_replica=True)
    assert store.find([1, 2], 9.0) == {1, 2}
    assert store.find([1, 2], 18.0) == {1, 2}
    assert store.find([1], 19.5) == {1}
    assert store.find([1], 40.0) == {1}
    assert store.take_changes() == ((1,), ())
    assert store.find([1], 60.0) == set()


def test_without_stores_hot_prefixes_outlive_the_worker_that_had_them() -> None:
    """Few documents, all of them on one worker when nobody waits; it dies in the middle."""
    load = workload(num_documents=3)
    prefill = WorkerGroup("prefill", 3, MODEL)
    decode = WorkerGroup("decode", 1, MODEL, prefix_cache=False)
    deaths = tuple(Failure(number, 12.0 + number, 12.5 + number) for number in range(3))

    def hits(mbps: float) -> int:
        spec = ClusterSpec((prefill, decode), stores=Stores(replica_mbps=mbps), failures=deaths)
        result = simulate(spec, load)
        return int(np.sum(result.ttft_s < 0.05))

    assert hits(1e5) > hits(0.0)


def test_a_copied_prefix_takes_what_room_there_is() -> None:
    kv = KvMemory(40, 4, is_cache=True)
    kv.take(20)
    kv.adopt([1, 2, 3])
    kv.adopt([1, 2, 3, 4, 5, 6])
    assert kv.take_changes() == ([1, 2, 3, 4, 5], [])
    assert (kv.free, kv.available) == (0, 20), "nobody uses it"
