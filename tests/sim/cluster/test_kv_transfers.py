"""KV between simulated workers: when it arrives, who waits for whom, and what came too late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Failure, Network
from halfmoon.sim.cluster.idle_workers import idle_workers
from halfmoon.sim.cluster.kv_codecs import KvCodec
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.job import Job
from halfmoon.sim.workloads.workload import Prefixes
from tests.sim.small_clusters import FAST, MODEL, group, pair, work


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
    fetching = ClusterSpec(groups, replace(FAST, bytes_per_s=1e12))
    times = [simulate(spec, rows, seed=3).ttft_s[2] for spec in (fetching, replace(fetching, placement="cache-aware"))]
    assert times[0] < 0.05 < times[1]


def test_what_is_fetched_is_encoded_where_that_is_quicker() -> None:
    """At 100 MB/s, 50 kB a token take 0.5 ms raw and 0.34 as planes in zstd: three of four blocks arrive while one is
    computed, and the prompt's last token follows. The planes are what the port carries.
    """
    ids = [[1, 2, 3, 4], [1, 2, 3, 4, 9], [1, 2, 3, 4]]
    rows = work((0.0, 256, 1), (5.0, 5_000, 1), (5.1, 257, 1), ids=ids)
    groups = (group("prefill", 2, latency=replace(MODEL, kv_bytes_per_token=5e4)), group("decode"))
    found = simulate(ClusterSpec(groups, replace(FAST, bytes_per_s=1e8)), rows)
    assert found.ttft_s[2] == pytest.approx(192 * 5e4 / 1e8 / 1.46 + 0.001)
    assert found.handover_bytes == pytest.approx(192 * 5e4 / 1.46)


def test_a_prefix_may_come_from_each_worker_that_has_it_whole() -> None:
    """Of five workers two have its four blocks, one has two of them."""
    spec = ClusterSpec((group("prefill", 5), group("decode")), replace(FAST, bytes_per_s=1e12))
    workers = idle_workers(spec, None, keeps_times=False)
    rows = work((0.0, 257, 1), ids=[[1, 2, 3, 4]])
    router = PolicyRouter(spec, workers, rows.prefixes, 1, 0)
    for number, blocks in ((1, [1, 2, 3, 4]), (3, [1, 2, 3, 4]), (4, [1, 2])):
        workers[number].kv.adopt(blocks)
        router.report(workers[number], 0.0)
    job = Job(0, 0.0, 257, 1, [1, 2, 3, 4])
    target = router.view.worker(0)
    assert target.worker_id == workers[0].name
    placement = Placement(target, target, 0.1, 0.01, fetched_tokens=256, source=router.view.worker(1).holder)
    assert [worker.number for worker in router.sources(job, placement)] == [1, 3]


def test_layers_of_a_prefix_arrive_while_the_step_behind_it_computes() -> None:
    """1,024 tokens take a second to fetch, and 1,100 more 1.1 to compute: half of the first are computed, too, or the
    step begins with a fifth of their layers.
    """
    ids = [[*range(16)], [*range(16), 99], [*range(16)]]
    rows = work((0.0, 1_024, 1), (5.0, 9_000, 1), (5.1, 2_124, 1), ids=ids)
    small = 16 * 64 * 15  # one reader may hold 15 blocks of it, where the prefix has 16
    for layer_passes, kv_tokens, ready_s in ((0, 10**6, 0.512), (5, 10**6, 1.024 / 5 + 0.04), (5, small, 0.512)):
        groups = (group("prefill", 2, layer_passes=layer_passes, kv_tokens=kv_tokens), group("decode"))
        found = simulate(ClusterSpec(groups, replace(FAST, bytes_per_s=1e9)), rows)
        assert found.ttft_s[2] == pytest.approx(ready_s + 1.1)


def test_a_chat_finds_its_own_answer_with_its_decode_worker() -> None:
    """Four whole blocks of question and answer are there, so 64 of 320 tokens are sent; without the answer 192."""
    rows = work((0.0, 128, 129), (10.0, 320, 2), ids=[[1, 2], [1, 2, 3, 4, 5]])
    assert rows.prefixes is not None
    answers = Prefixes(64, np.array([3, 4]), np.array([0, 2, 2]))
    known = replace(rows, prefixes=replace(rows.prefixes, answers=answers))
    sent = [simulate(pair(), one).handover_bytes / 1e6 for one in (rows, known)]
    assert sent == pytest.approx([128 + 192, 128 + 64])


def test_what_a_holder_has_lost_is_computed() -> None:
    """Three of the four blocks made room at 5.0 s; the gateway, which hears of it at 6.0, has all four fetched at 5.9.
    The one that is left takes 32 ms, the others 193.
    """
    ids = [[1, 2, 3, 4], [1, *range(10, 29)], [1, 2, 3, 4]]
    rows = work((0.0, 257, 1), (5.0, 1_300, 1), (5.9, 257, 1), ids=ids)
    groups = (group("prefill", 2, kv_tokens=21 * 64), group("decode", prefix_cache=False))
    found = simulate(ClusterSpec(groups, replace(FAST, bytes_per_s=2e9)), rows)
    assert found.ttft_s[2] == pytest.approx(0.032 + 0.193)


def test_codecs_take_their_time_beside_the_link() -> None:
    """100 MB at 1 GB/s; encoded at half of that they take twice as long, however fast the link is."""
    slow = Network(bytes_per_s=1e9, latency_s=0.0, handover="pull", codec=KvCodec(1.0, 5e8))
    found = simulate(pair(slow), work((0.0, 100, 2)))
    assert found.end_s[0] == pytest.approx(0.1 + 0.2 + 0.011)
    halved = replace(slow, codec=KvCodec(0.5))
    assert simulate(pair(halved), work((0.0, 100, 2))).end_s[0] == pytest.approx(0.1 + 0.05 + 0.011)


def test_workers_choose_what_is_quickest_over_each_link() -> None:
    """By the rule of live ones: planes in zstd between nodes of 100 MB/s, raw KV within them."""
    network = Network(bytes_per_s=1e8, node_bytes_per_s=1e10, latency_s=0.0, handover="pull", codec="auto")
    far = simulate(pair(network), work((0.0, 100, 2)))
    assert far.end_s[0] == pytest.approx(0.1 + 1.0 / 1.46 + 0.011)
    near = pair(network, groups=(group("prefill", first_node=0), group("decode", first_node=0)))
    assert simulate(near, work((0.0, 100, 2))).end_s[0] == pytest.approx(0.1 + 0.01 + 0.011)


def test_what_was_on_its_way_to_a_worker_that_died_arrives_nowhere() -> None:
    """Who decodes dies at 0.15 s, in the middle of the transfer: a tenth of a second later all is computed once more,
    with a token, and sent."""
    slow = Network(bytes_per_s=1e9, latency_s=0.0, handover="pull")
    found = simulate(pair(slow, failures=(Failure(1, 0.15, 0.16),)), work((0.0, 100, 3)))
    assert found.num_retries.tolist() == [1]
    assert found.end_s[0] == pytest.approx(0.15 + 0.1 + 0.101 + 0.101 + 0.011)
