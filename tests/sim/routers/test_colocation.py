"""What a simulated gateway knows of shared cores and of what requests take beside their work: it refuses by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, SloTargets
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.cluster.idle_workers import idle_workers
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.simulation import simulate
from tests.sim.cluster.test_shared_cores import beside
from tests.sim.small_clusters import FAST, group, pair, work

SLOWED = Contention(
    prefill_beside_prefill=2.0, prefill_beside_decode=1.5, decode_beside_prefill=4.0, decode_beside_decode=3.0
)


def predicted(spec: ClusterSpec, ttft_s: float | None = None, tpot_s: float | None = None) -> ClusterSpec:
    return replace(spec, admission="predicted", targets=SloTargets(ttft_s, tpot_s))


def test_a_figure_is_the_mean_of_those_beside() -> None:
    assert SLOWED.added("prefill", ["decode"]) == pytest.approx(0.5)
    assert SLOWED.added("decode", ["prefill", "decode"]) == pytest.approx((3.0 + 2.0) / 2)
    assert SLOWED.added("prefill", ["both"]) == pytest.approx((1.0 + 0.5) / 2)
    assert SLOWED.added("prefill", []) == 0


def test_workers_of_a_node_are_on_one_host_and_those_of_others_are_not() -> None:
    """Two nodes of a prefill and a decode worker each, and a prefill worker that has its own."""
    shared = [group(role, first_node=node) for node in (0, 1) for role in ("prefill", "decode")]
    spec = ClusterSpec((*shared, group("prefill", first_node=2)), FAST, contention=SLOWED)
    gateway = PolicyRouter(spec, idle_workers(spec, None, keeps_times=False), None, 1, 0)
    views = {one.worker_id: one for one in gateway.view.workers}
    assert views["prefill-0"].host == views["decode-1"].host != views["prefill-2"].host == views["decode-3"].host
    assert [views[f"prefill-{number}"].contention for number in (0, 2, 4)] == pytest.approx([0.5, 0.5, 0.0])
    assert views["decode-1"].step_contention == pytest.approx(3.0)
    apart = replace(spec, contention=Contention())
    plain = PolicyRouter(apart, idle_workers(apart, None, keeps_times=False), None, 1, 0).view.workers
    assert all(one.contention == one.step_contention == 0 for one in plain)
    assert len({one.host for one in plain}) == 5


@pytest.mark.parametrize(("slowdown", "outcomes"), [(2.0, [0, 1]), (1.2, [0, 0])])
def test_a_prompt_that_a_neighbour_would_make_late_is_refused(slowdown: float, outcomes: list[int]) -> None:
    """The second prompt takes 0.1 s alone, and 0.2 or 0.12 s beside the first one's answer."""
    found = simulate(
        predicted(beside(slowdown, 1.0), ttft_s=0.15), work((0.0, 100, 500), (0.5, 100, 2)), policies="always"
    )
    assert found.outcome.tolist() == outcomes


def test_an_answer_beside_prompts_is_told_to_be_slow() -> None:
    """Prompts come all the time, so that the decode worker's steps of 11 ms take 33."""
    rows = work(*((0.1 * number, 100, 2) for number in range(200)), (20.05, 100, 50))
    rough = simulate(predicted(beside(1.0, 3.0), tpot_s=0.04), rows, policies="always")
    strict = simulate(predicted(beside(1.0, 3.0), tpot_s=0.02), rows, policies="always")
    assert rough.outcome[-1] == 0
    assert strict.outcome[-1] == 1


def test_neighbours_are_busy_no_longer_than_they_have_work() -> None:
    """Prompts came all the time, and none in the last minute: two answers have the cores to themselves."""
    rows = work(*((0.1 * number, 100, 2) for number in range(200)), (100.0, 100, 50), (100.2, 100, 50))
    found = simulate(predicted(beside(1.0, 3.0), tpot_s=0.02), rows, policies="always")
    assert found.outcome[-2:].tolist() == [0, 0]


def test_what_requests_take_beside_their_work_is_learned_from_the_first_three() -> None:
    """0.1 s of work and 0.06 s of way, where 0.15 s are promised: the fourth is refused as those after it are."""
    spec = predicted(pair(request_s=0.04, answer_s=0.02), ttft_s=0.15)
    found = simulate(spec, work(*((float(number), 100, 2) for number in range(6))))
    assert found.outcome.tolist() == [0, 0, 0, 1, 1, 1]
    roomy = simulate(
        replace(spec, targets=SloTargets(ttft_s=0.17)), work(*((float(number), 100, 2) for number in range(6)))
    )
    assert roomy.is_completed.all()


def test_what_a_handover_takes_is_learned_where_there_are_overheads() -> None:
    """A transfer of 0.1 s makes the mean gap of ten 10 ms longer than a step: with gaps or without, the fourth is
    refused."""
    slow = Network(bytes_per_s=1e9, latency_s=0.0, handover="pull")
    spec = predicted(pair(slow, answer_s=1e-3), tpot_s=0.018)
    rows = work(*((float(number), 100, 11) for number in range(6)))
    for with_gaps in (True, False):
        found = simulate(spec, rows, with_gaps=with_gaps)
        assert found.outcome.tolist() == [0, 0, 0, 1, 1, 1]
    assert simulate(replace(spec, targets=SloTargets(tpot_s=0.03)), rows).is_completed.all()
