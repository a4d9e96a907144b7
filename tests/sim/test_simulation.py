"""The simulated cluster: arithmetic by hand, conservation, determinism, memory, hand-over, prefixes, failures."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models.latency import StepModel
from halfmoon.policy.placement.conditional import ConditionalMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Failure, Network, SloTargets, WorkerGroup
from halfmoon.sim.cluster.kv_codecs import KvCodec
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.latency_model import StepPiece
from halfmoon.sim.result import Attainment
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.workloads.workload import Workload
from tests.sim.small_clusters import FAST, MODEL, group, pair, work

FILLED = replace(MODEL, num_stages=4, fills_stages=True)


def test_two_requests_by_hand() -> None:
    """Prompts of 100 and 50 tokens, one after the other; then they decode together for a while.

    The first decodes from 0.1 s at 11 ms a step. The second one's token is there at 0.15 s, in the first one's fifth
    step, which ends at 0.155 s. From there steps take 12 ms: three of them finish the first one's nine tokens.
    """
    found = simulate(pair(), work((0.0, 100, 9), (0.0, 50, 5)))
    assert found.ttft_s == pytest.approx([0.1, 0.15])
    assert found.end_s == pytest.approx([0.155 + 3 * 0.012, 0.155 + 3 * 0.012 + 0.011])
    assert found.tpot_s == pytest.approx([(0.191 - 0.1) / 8, (0.202 - 0.15) / 4])
    assert found.longest_gap_s == pytest.approx([0.012, 0.155 + 0.012 - 0.15])  # the second waited for a step to end
    assert found.tail_gap_s == pytest.approx(found.longest_gap_s)  # of fewer than eleven gaps, a tenth is one


def test_the_way_there_is_before_the_queue_and_the_way_back_holds_nobody_up() -> None:
    """Prompts of 0.1 s that come 30 ms apart: the way of the second is over before the first is computed."""
    plain = simulate(pair(), work((0.0, 100, 9), (0.03, 100, 9)))
    found = simulate(pair(request_s=0.02, answer_s=0.5), work((0.0, 100, 9), (0.03, 100, 9)))
    assert found.ttft_s == pytest.approx(plain.ttft_s + 0.52)
    assert found.end_s == pytest.approx(plain.end_s + 0.52)
    assert found.tpot_s == pytest.approx(plain.tpot_s)
    met = simulate(pair(answer_s=0.5, targets=SloTargets(ttft_s=0.55)), work((0.0, 10, 2), (1.0, 100, 2)))
    assert met.attainment(SloTargets(ttft_s=0.55)).ttft == 0.5


def test_a_colocated_step_computes_a_chunk_beside_decodes() -> None:
    """The second prompt comes while the first one decodes: 16 tokens a step of it, beside which the step is longer."""
    spec = ClusterSpec((group("both", limits=BatchLimits(chunk_tokens=16)),), FAST)
    found = simulate(spec, work((0.0, 10, 100), (0.05, 32, 2)))
    first_decode_s = 0.01 + 4 * 0.011  # 0.054 is the end of the step under way
    step_s = max(0.017, 0.011)  # 16 tokens and one
    assert found.ttft_s[1] == pytest.approx(first_decode_s + 2 * step_s - 0.05)


def test_prefill_first_stops_decodes_meanwhile() -> None:
    limits = BatchLimits(chunk_tokens=16, batching="prefill-first")
    found = simulate(ClusterSpec((group("both", limits=limits),), FAST), work((0.0, 10, 100), (0.05, 32, 2)))
    assert found.ttft_s[1] == pytest.approx(0.054 + 0.032 - 0.05)


@pytest.mark.parametrize(("pp", "ttft_s"), [(1, 0.0752), (2, 0.0782)])
def test_distserves_low_rate(pp: int, ttft_s: float) -> None:
    model = DistServeCoefficients("opt-13b").model(None, 1, pp)
    limits = BatchLimits(model.kv_tokens, model.kv_tokens, 1 << 20)
    groups = tuple(WorkerGroup(role, 1, model, limits) for role in ("prefill", "decode"))
    found = simulate(ClusterSpec(groups, FAST), work(*((10.0 * number, 512, 64) for number in range(5))))
    assert found.ttft_s == pytest.approx([ttft_s] * 5, abs=5e-5)


def test_a_pipeline_takes_the_next_prompt_before_the_last_one_is_through() -> None:
    """Four stages of 0.1 s for 100 tokens: the second prompt follows a stage behind."""
    groups = (group("prefill", latency=FILLED, limits=BatchLimits(100)), group("decode"))
    found = simulate(ClusterSpec(groups, FAST), work((0.0, 100, 1), (0.0, 100, 1)))
    assert found.ttft_s == pytest.approx([0.4, 0.5])


def test_a_stage_waits_for_a_slower_prompt_ahead() -> None:
    """The bubble: 50 tokens behind 100 leave each stage as the longer ones let them."""
    groups = (group("prefill", latency=FILLED, limits=BatchLimits(100)), group("decode"))
    found = simulate(ClusterSpec(groups, FAST), work((0.0, 100, 1), (0.0, 50, 1)))
    assert found.ttft_s == pytest.approx([0.4, 0.45])


def test_a_known_prefix_is_not_computed_again() -> None:
    spec = ClusterSpec((group("both"),), FAST)
    found = simulate(spec, work((0.0, 130, 1), (10.0, 130, 1), ids=[[1, 2, 3], [1, 2, 4]]))
    assert found.cached_tokens.tolist() == [0, 128]
    assert found.ttft_s == pytest.approx([0.130, 0.002])


def test_the_least_recently_used_prefix_is_evicted() -> None:
    """Memory for one prompt and a block: what is left of an older one is its beginning."""
    small = group("both", kv_tokens=64 * 4)
    ids = [[1, 2], [3, 4], [5, 6], [1, 2], [5, 6]]
    rows = [(10.0 * number, 129, 1) for number in range(5)]
    found = simulate(ClusterSpec((small,), FAST), work(*rows, ids=ids))
    assert found.cached_tokens.tolist() == [0, 0, 0, 0, 64]
    roomy = simulate(ClusterSpec((group("both", kv_tokens=64 * 9),), FAST), work(*rows, ids=ids))
    assert roomy.cached_tokens.tolist() == [0, 0, 0, 128, 128]


def test_unequal_blocks_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a multiple"):
        simulate(ClusterSpec((group("both"),), FAST), work((0.0, 100, 1), ids=[[1]], block_tokens=100))


def test_a_request_that_no_worker_can_hold_is_refused() -> None:
    found = simulate(pair(), work((0.0, 64 * 300, 2), (0.0, 10, 2)))
    assert found.outcome.tolist() == [1, 0]
    assert np.isnan(found.ttft_s[0])


def test_push_refuses_what_finds_no_room_and_pull_lets_it_wait() -> None:
    rows = [(0.001 * number, 64 * 60, 200) for number in range(20)]
    pushed = simulate(pair(), work(*rows))
    pulled = simulate(pair(replace(FAST, handover="pull")), work(*rows))
    assert (pushed.outcome == 1).any()
    assert (pulled.outcome == 0).all()


def test_who_waits_for_room_gets_it_when_a_preempted_one_ends_with_its_prompt() -> None:
    limits = BatchLimits(max_batch_tokens=64, chunk_tokens=16, max_running=2)
    groups = (group("prefill", limits=limits), group("decode", limits=limits, kv_tokens=64 * 18))
    spec = ClusterSpec(groups, Network(bytes_per_s=1e10, handover="pull"), "random")
    rows = (1.5, 716, 120), (1.875, 46, 92), (2.0, 1, 83), (2.5, 204, 116), (3.0, 1, 70)
    assert simulate(spec, work(*rows), 5).is_completed.all()


def test_who_waits_for_room_gets_what_was_reserved_for_one_whose_prefill_worker_died() -> None:
    """The first one's KV is on its way for 20 ms when its worker dies; then the second one's goes."""
    groups = group("prefill", 2), group("decode", kv_tokens=64 * 4)
    slow = Network(bytes_per_s=1e4 * MODEL.kv_bytes_per_token, latency_s=0.0, handover="pull")
    rows = (0.0, 200, 5), (0.001, 200, 5)
    for dies in (0, 1):  # with either of them
        spec = ClusterSpec(groups, slow, "least-loaded", failures=(Failure(dies, 0.21),))
        found = simulate(spec, work(*rows), 1)
        if found.num_retries[0]:
            assert found.end_s[1] == pytest.approx(0.22 + 0.02 + 4 * 0.011)
            return
    pytest.fail("the first prompt was on neither worker")


def test_who_was_preempted_gets_what_was_reserved_for_those_whose_prefill_worker_died() -> None:
    """The first one decodes until the others' reservations leave no block for it. They are lost with the only prefill
    worker, and would be computed elsewhere.
    """
    parts: dict[str, object] = {
        "latency": FILLED,
        "limits": BatchLimits(2048, 16),
        "kv_tokens": 64 * 18,
    }
    groups = group("prefill", 1, **parts), group("decode", 1, **parts)
    spec = ClusterSpec(groups, FAST, "random", failures=(Failure(0, 2.0),), conditional="off")
    found = simulate(spec, work((0.0, 33, 33), (0.0, 256, 2), (0.0, 704, 2)))
    assert found.outcome.tolist() == [0, 2, 2]
    assert found.end_s[0] < 3.0


def test_admission_refuses_before_anything_is_computed() -> None:
    spec = pair(admission="predicted", targets=SloTargets(ttft_s=0.5))
    found = simulate(spec, work(*((0.001 * number, 200, 2) for number in range(20))))
    refused = found.outcome == 1
    assert refused.any()
    assert np.isnan(found.ttft_s[refused]).all()
    assert found.ttft_s[~refused].max() < 0.6


def test_admission_learns_what_the_hand_over_takes() -> None:
    """Its codec makes the mean of nineteen gaps too long, of which gateways know nothing before three such answers."""
    slow = Network(bytes_per_s=1e11, codec=KvCodec(1.0, 100 * MODEL.kv_bytes_per_token / 1.2))
    spec = pair(slow, admission="predicted", targets=SloTargets(tpot_s=0.04))
    found = simulate(spec, work(*((3.0 * number, 100, 20) for number in range(4))))
    assert found.tpot_s[:3].min() > 0.05
    assert found.outcome.tolist() == [0, 0, 0, 1]


def test_admission_knows_what_a_slow_link_adds_to_the_first_gap() -> None:
    """The link's 0.95 s are 50 ms for each of nineteen gaps, as its sender has measured it."""
    slow = Network(bytes_per_s=1e11, latency_s=0.95)
    requests = work(*((3.0 * number, 100, 20) for number in range(2)))
    for tpot_s, outcome in ((0.04, 1), (0.07, 0)):
        found = simulate(pair(slow, admission="predicted", targets=SloTargets(tpot_s=tpot_s)), requests)
        assert found.outcome.tolist() == [outcome] * 2
    assert found.tpot_s == pytest.approx([0.011 + 0.95 / 19] * 2, rel=0.02)


@pytest.mark.parametrize(("chunk_tokens", "outcome"), [(512, 0), (16, 1)])
def test_admission_knows_that_prompts_go_in_chunks_beside_decodes(chunk_tokens: int, outcome: int) -> None:
    """Of 200 tokens: one step of 211 ms, or 13 steps, of which each takes the decode's 11 ms, too."""
    limits = BatchLimits(chunk_tokens=chunk_tokens)
    spec = ClusterSpec((group("both", limits=limits),), FAST, admission="predicted", targets=SloTargets(ttft_s=0.25))
    found = simulate(spec, work((0.0, 10, 500), (0.05, 200, 2)))
    assert found.outcome.tolist() == [0, outcome]


def test_attainment_joint_and_marginal() -> None:
    found = simulate(pair(), work((0.0, 100, 9), (0.0, 50, 5)))
    targets = SloTargets(ttft_s=0.12, tpot_s=0.0115)  # the first request meets both, the second neither
    assert found.attainment(targets) == Attainment(0.5, 0.5, 0.5, 1.0)
    crossed = SloTargets(ttft_s=0.12, tpot_s=0.011)
    assert found.attainment(crossed).value("joint") == 0
    assert found.attainment(SloTargets()).value("marginal") == 1


def test_equal_prompts_wait_as_lindleys_recursion_says() -> None:
    """Prompts that fill a step, so that each is served alone: 0.2 s each, at a load of 0.8."""
    start_s = np.cumsum(np.random.default_rng(1).exponential(0.25, 500))
    limits = BatchLimits(max_batch_tokens=200)
    found = simulate(
        ClusterSpec((group("prefill", limits=limits), group("decode")), FAST),
        work(*((at_s, 200, 1) for at_s in start_s)),
    )
    expected, wait_s = [], 0.0
    for gap_s in [0.0, *np.diff(start_s)]:
        wait_s = max(wait_s - gap_s, 0.0)
        expected.append(wait_s + 0.2)
        wait_s += 0.2
    assert found.ttft_s == pytest.approx(expected)


# what holds of any run

ROWS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(1, 120)), min_size=1, max_size=40)


def drawn(rows: list[tuple[float, int, int]]) -> Workload:
    return work(*sorted(rows))


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    limits = BatchLimits(
        draw(st.sampled_from([64, 200, 2048])),
        draw(st.sampled_from([16, 512])),
        draw(st.sampled_from([2, 8, 64])),
        draw(st.sampled_from(["chunked", "prefill-first"])),
        nests_steps=draw(st.booleans()),
    )
    latency = replace(MODEL, num_stages=draw(st.sampled_from([1, 2, 4])), fills_stages=draw(st.booleans()))
    one = {"limits": limits, "latency": latency, "kv_tokens": 64 * draw(st.sampled_from([18, 40, 200]))}
    num = draw(st.integers(1, 3))
    groups: tuple[WorkerGroup, ...] = (group("both", num, **one),)
    if draw(st.booleans()):
        groups = (group("prefill", num, **one), group("decode", draw(st.integers(1, 2)), **one))
    network = replace(Network(bytes_per_s=1e10), handover=draw(st.sampled_from(["push", "pull"])))
    placement = draw(st.sampled_from(get_args(PlacementMode)))
    return ClusterSpec(groups, network, placement)


@settings(max_examples=60)
@given(clusters(), ROWS, st.integers(0, 5))
def test_every_request_ends_memory_holds_and_no_law_of_time_is_broken(
    spec: ClusterSpec, rows: list[tuple[float, int, int]], seed: int
) -> None:
    workload = drawn(rows)
    found = simulate(spec, workload, seed)
    done = found.is_completed
    may_refuse = spec.network.handover == "push"
    assert may_refuse or done.all()
    assert (found.workers.peak_kv <= 1).all()
    latency = spec.groups[0].latency
    least_s = np.array([latency.stage_s(int(new), 0, 0, 0) for new in workload.prompt_tokens])
    assert (found.ttft_s[done] >= least_s[done] - 1e-9).all()
    assert (found.wait_s[done] >= -1e-12).all()
    several = done & (workload.output_tokens > 1)
    assert (found.tpot_s[several] >= latency.cycle(1).base_s - 1e-9).all()
    for column in (found.tpot_s, found.longest_gap_s, found.tail_gap_s):
        assert np.isnan(column[~several]).all()
    assert (found.longest_gap_s[several] >= found.tail_gap_s[several] - 1e-12).all()
    assert (found.tail_gap_s[several] >= found.tpot_s[several] - 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 900), st.integers(2, 200))
def test_equal_steps_have_the_longest_gap_of_their_mean(prompt: int, output: int) -> None:
    found = simulate(ClusterSpec((group("both"),), FAST), work((0.0, prompt, output)))
    assert found.longest_gap_s == pytest.approx(found.tpot_s)


@settings(max_examples=40, deadline=None)
@given(clusters(), ROWS)
def test_gaps_are_those_of_a_run_with_an_event_for_each_token(
    spec: ClusterSpec, rows: list[tuple[float, int, int]]
) -> None:
    """A run of steps in one event has the same gaps as one where each step is an event, contexts growing meanwhile."""
    growing = replace(spec.groups[0].latency, step=(StepPiece(0, StepModel(0.0101, 1.1e-3, 1.3e-6)),))
    grown = replace(spec, groups=tuple(replace(one, latency=growing) for one in spec.groups))
    fast = simulate(grown, drawn(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeBatch, "affordable_steps", lambda batch, most, num_blocks: 1)
        slow = simulate(grown, drawn(rows))
    for name in ("end_s", "longest_gap_s", "tail_gap_s"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(clusters(), ROWS)
def test_without_gaps_all_else_is_the_same(spec: ClusterSpec, rows: list[tuple[float, int, int]]) -> None:
    whole, without = simulate(spec, drawn(rows)), simulate(spec, drawn(rows), with_gaps=False)
    for name in ("ttft_s", "tpot_s", "end_s", "wait_s", "outcome", "cached_tokens"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(without, name))
    assert np.isnan(without.longest_gap_s).all()
    with pytest.raises(AssertionError, match="with gaps"):
        without.attainment(SloTargets(tbt_s=1.0))


@settings(max_examples=15)
@given(clusters(), ROWS, st.integers(0, 5))
def test_a_seed_repeats_itself(spec: ClusterSpec, rows: list[tuple[float, int, int]], seed: int) -> None:
    one, other = (simulate(spec, drawn(rows), seed) for _ in range(2))
    for name in ("ttft_s", "tpot_s", "end_s", "outcome"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@settings(max_examples=40)
@given(clusters(), ROWS)
def test_where_there_is_one_way_to_go_the_policies_go_it(spec: ClusterSpec, rows: list[tuple[float, int, int]]) -> None:
    single = replace(spec, groups=tuple(replace(group, count=1) for group in spec.groups))
    short, decided = (simulate(single, drawn(rows), policies=asked) for asked in ("as needed", "always"))
    for name in ("ttft_s", "tpot_s", "end_s", "outcome"):
        np.testing.assert_array_equal(getattr(short, name), getattr(decided, name))


@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_equal_prompts_get_their_first_tokens_in_the_order_of_arrival(starts_s: list[float]) -> None:
    rows = [(at_s, 100, 3) for at_s in sorted(starts_s)]
    found = simulate(pair(), work(*rows))
    first_s = found.start_s + found.ttft_s
    assert (np.diff(first_s) >= -1e-12).all()


@settings(max_examples=40)
@given(
    clusters(),
    ROWS,
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3), st.booleans()), max_size=4),
    st.sampled_from(["off", "failover"]),
)
def test_every_request_ends_where_workers_die(
    spec: ClusterSpec,
    rows: list[tuple[float, int, int]],
    deaths: list[tuple[int, float, bool]],
    conditional: ConditionalMode,
) -> None:
    failures = tuple(
        Failure(worker % spec.num_workers, at_s, at_s + 0.5 if returns else None) for worker, at_s, returns in deaths
    )
    found = simulate(replace(spec, failures=failures, conditional=conditional), drawn(rows))
    assert (found.workers.peak_kv <= 1).all()
    assert (found.end_s >= found.start_s).all()
    may_refuse = conditional != "off" or spec.network.handover == "push"  # a full decode worker
    if all(returns for _, _, returns in deaths) and not may_refuse and len(deaths) <= 2:
        assert found.is_completed.all()


def test_a_request_goes_on_elsewhere_with_the_tokens_it_has() -> None:
    """It decodes for 0.1 s when its worker dies: nine steps of 11 ms are done, and 110 tokens are computed again."""
    spec = ClusterSpec((group("both", 2),), FAST, failures=(Failure(0, 0.2, None), Failure(1, 0.2, 0.3)))
    found = simulate(spec, work((0.0, 100, 20)))
    assert found.ttft_s[0] == pytest.approx(0.1)
    assert found.num_retries.tolist() == [1]
    assert found.end_s[0] == pytest.approx(0.3 + 0.110 + 9 * 0.011)


def test_an_answer_whose_worker_dies_in_a_pause_may_be_paused_again_elsewhere() -> None:
    limits = BatchLimits(2048, 512, 1)
    classes = QosClass("urgent"), QosClass("batch", priority=1, max_pause_s=100.0)
    workers = (group("both", 2, limits=limits),)
    spec = ClusterSpec(workers, FAST, "least-loaded", failures=(Failure(1, 0.5, None),), classes=classes)
    rows = [(0.0, 100, 200), (0.0, 100, 200), (0.3, 50, 50), (0.31, 50, 50), (2.0, 50, 5)]
    found = simulate(spec, replace(work(*rows), classes=np.array([1, 1, 0, 0, 0])))
    assert found.is_completed.all()


def test_a_longer_context_makes_the_last_gap_the_longest() -> None:
    """Alone, 10 ms, 1 ms for the sequence and 0.1 ms for each token before: 20 gaps, of which the longest two count."""
    growing = replace(MODEL, step=(StepPiece(0, StepModel(0.01, 1e-3, 1e-4)),))
    found = simulate(ClusterSpec((group("both", latency=growing),), FAST), work((0.0, 100, 21)))
    assert found.longest_gap_s == pytest.approx([0.011 + 1e-4 * 120])
    assert found.tail_gap_s == pytest.approx([0.011 + 1e-4 * 119.5])
    assert found.tpot_s == pytest.approx([0.011 + 1e-4 * 110.5])


def test_a_prompt_between_two_steps_lengthens_one_gap() -> None:
    """Where prompts go first, 32 tokens of one are 32 ms more between two tokens; in chunks of 16, twice 6 ms."""
    rows = work((0.0, 10, 100), (0.05, 32, 2))
    first, chunked = (
        simulate(ClusterSpec((group("both", limits=BatchLimits(chunk_tokens=16, batching=batching)),), FAST), rows)
        for batching in ("prefill-first", "chunked")
    )
    assert first.longest_gap_s[0] == pytest.approx(0.032 + 0.012)
    assert first.tail_gap_s[0] == pytest.approx((0.032 + 0.012 + 9 * 0.011) / 10)
    assert chunked.longest_gap_s[0] == pytest.approx(0.017)
    assert chunked.tail_gap_s[0] == pytest.approx((2 * 0.017 + 0.012 + 7 * 0.011) / 10)


def test_a_handover_and_a_death_lengthen_a_gap() -> None:
    """The transfer is behind the first token; a worker that dies costs what is computed again, and the wait for it."""
    slow = Network(bytes_per_s=1e9, latency_s=0.005, handover="pull")
    assert simulate(pair(slow), work((0.0, 100, 9))).longest_gap_s == pytest.approx([0.1 + 0.005 + 0.011])
    spec = ClusterSpec((group("both"),), FAST, failures=(Failure(0, 0.2, 0.3),))
    found = simulate(spec, work((0.0, 100, 20)))  # the ninth step ends at 0.199; 110 tokens are computed from 0.3 on
    assert found.longest_gap_s == pytest.approx([0.3 + 0.110 - 0.199])


def test_a_tbt_target_is_of_the_longest_gap_or_of_the_longest_tenth() -> None:
    limits = BatchLimits(chunk_tokens=16, batching="prefill-first")
    found = simulate(ClusterSpec((group("both", limits=limits),), FAST), work((0.0, 10, 100), (0.05, 32, 2)))
    assert found.attainment(SloTargets(tbt_s=0.02)) == Attainment(0.5, 1.0, 1.0, 0.5)
    assert found.attainment(SloTargets(tbt_s=0.02, tbt_of="longest-tenth")) == Attainment(1.0, 1.0, 1.0, 1.0)
    assert found.attainment(SloTargets(tbt_s=0.02)).value("marginal") == 0.5


def test_progress_is_told_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    simulate(pair(), work((0.0, 10, 1)), on_progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (1, 1)
