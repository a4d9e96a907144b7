"""KV between simulated workers: when it arrives, who waits for whom, and what came too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Failure, Network
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import FAST, group, pair, work


def test_a_transfer_that_waits_for_the_prefill_and_one_that_went_along() -> None:
    """100 tokens are 100 MB: 100 ms at 1 GB/s, all of it behind the prefill, or all but the last frame beside it."""
    slow = Network(bytes_per_s=1e9, latency_s=0.005)
    pulled = simulate(pair(replace(slow, handover="pull")), work((0.0, 100, 2)))
    pushed = simulate(pair(slow), work((0.0, 100, 2)))
    assert pulled.end_s[0] == pytest.approx(0.1 + 0.1 + 0.005 + 0.011)
    assert pushed.end_s[0] == pytest.approx(0.1 + 0.002097152 + 0.005 + 0.011)
    assert pulled.ttft_s[0] == pushed.ttft_s[0] == pytest.approx(0.1)


def test_transfers_share_the_port_of_the_receiver() -> None:
    spec = ClusterSpec((group("prefill", 2), group("decode")), Network(bytes_per_s=1e9, latency_s=0.0, handover="pull"))
    found = simulate(spec, work((0.0, 100, 2), (0.0, 100, 2)))
    assert sorted(found.end_s) == pytest.approx([0.1 + 0.1 + 0.011, 0.1 + 0.2 + 0.011])


def test_a_prefix_is_fetched_where_that_is_quicker() -> None:
    """One worker is busy with a long prompt and has the prefix; the other one gets it over the network."""
    ids = [[1, 2, 3, 4], [1, 2, 3, 4, 9], [1, 2, 3, 4]]
    rows = work((0.0, 256, 1), (5.0, 5_000, 1), (5.1, 257, 1), ids=ids)
    groups = (group("prefill", 2), group("decode"))
    times = {}
    for can_fetch in (False, True):
        found = simulate(ClusterSpec(groups, replace(FAST, bytes_per_s=1e12, can_fetch=can_fetch)), rows, seed=3)
        times[can_fetch] = found.ttft_s[2]
    assert times[True] < 0.05 < times[False]


def test_codecs_take_their_time_beside_the_link() -> None:
    """100 MB at 1 GB/s; encoded at half of that they take twice as long, however fast the link is."""
    slow = Network(bytes_per_s=1e9, latency_s=0.0, handover="pull", encode_bytes_per_s=5e8)
    found = simulate(pair(slow), work((0.0, 100, 2)))
    assert found.end_s[0] == pytest.approx(0.1 + 0.2 + 0.011)
    halved = replace(slow, encode_bytes_per_s=None, kv_ratio=0.5)
    assert simulate(pair(halved), work((0.0, 100, 2))).end_s[0] == pytest.approx(0.1 + 0.05 + 0.011)


def test_what_was_on_its_way_to_a_worker_that_died_arrives_nowhere() -> None:
    """Who decodes dies at 0.15 s, in the middle of the transfer: a tenth of a second later all is computed once more,
    with a token, and sent."""
    slow = Network(bytes_per_s=1e9, latency_s=0.0, handover="pull")
    found = simulate(pair(slow, failures=(Failure(1, 0.15, 0.16),)), work((0.0, 100, 3)))
    assert found.num_retries.tolist() == [1]
    assert found.end_s[0] == pytest.approx(0.15 + 0.1 + 0.101 + 0.101 + 0.011)
