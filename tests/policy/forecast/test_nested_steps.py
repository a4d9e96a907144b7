"""Prompts that run in the middle of a running prefill step, foreseen: when they are computed, and what they delay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.policy.forecast.colocated_workers import ColocatedWorkers
from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.prefill_queue_model import PrefillQueueModel
from halfmoon.policy.forecast.prefill_queue_models import PrefillQueueModels
from halfmoon.policy.forecast.prefill_step import PromptWork, Speed, StepRoom
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.nested_step import nested_cost
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role
from tests.policy.busy_host import beside
from tests.policy.forecast.test_prefill_queue_model import no_decodes
from tests.policy.forecast.test_prefill_queue_models import D, P, at

STEP = 100
ROOM = StepRoom(STEP, STEP)
PLAIN = Speed(PrefillModel(0.0, 0.01, 0.0), STEP)  # a second a full step
NESTS = PLAIN._replace(nests_steps=True)
NOBODY = ColocatedWorkers({})


def work(num_tokens: int, priority: int = 0, ready_s: float = -math.inf, most_seen: float = math.inf) -> PromptWork:
    return PromptWork(num_tokens, 0, priority, ready_s, most_seen)


def join(
    made: PrefillQueueModel, name: str, wanted: PromptWork, now_s: float, speed: Speed = NESTS, past_busy: float = 0.0
) -> None:
    made.join(name, wanted, None, ROOM, now_s, speed, past_busy)


def running(*prompts: int) -> PrefillQueueModel:
    """A step of these prompts has begun at 0."""
    made = PrefillQueueModel()
    made.join("before", work(STEP), None, ROOM, -1.0, PLAIN)
    for number, num_tokens in enumerate(prompts):
        made.join(str(number), work(num_tokens), None, ROOM, -1.0, PLAIN)
    made.computed("before", ROOM, 0.0)
    return made


def predict(
    made: PrefillQueueModel, wanted: PromptWork, now_s: float, speed: Speed = NESTS, past_busy: float = 0.0
) -> tuple[float, float]:
    found = made.predict(wanted, speed, NOBODY, past_busy, 0.0, now_s, no_decodes())
    return round(found.begins_s, 6), round(found.ends_s, 6)


def test_a_short_prompt_runs_in_the_middle_of_the_step() -> None:
    assert predict(running(100), work(50), 0.25) == (0.25, 0.75)
    assert predict(running(100), work(50, priority=-1), 0.25) == (0.25, 0.75)
    assert predict(running(1000), work(50), 0.25) == (0.25, 0.75)
    assert predict(running(50, 50), work(49), 0.0) == (0.0, 0.49)
    assert predict(running(100), work(29), 0.7) == (0.7, 0.99)
    assert predict(PrefillQueueModel(), work(50), 0.25) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("wanted", "now_s", "speed"),
    [
        (work(51), 0.25, NESTS),  # too long
        (work(31), 0.7, NESTS),  # the step is over sooner
        (work(10, priority=1), 0.25, NESTS),
        (work(10, ready_s=0.1), 0.25, NESTS),  # some of it is loaded
        (work(10, most_seen=5.0), 0.25, NESTS),
        (work(10), 0.25, NESTS._replace(nests_steps=False)),
        (work(10), 0.25, NESTS._replace(max_running=1)),
        (work(10), 7.0, NESTS),  # the step should be over
    ],
)
def test_other_prompts_wait_for_the_end_of_the_step(wanted: PromptWork, now_s: float, speed: Speed) -> None:
    made, ends_s = running(100), max(1.0, now_s + 0.05)
    assert predict(made, wanted, now_s, speed)[0] == ends_s
    join(made, "new", wanted, now_s, speed)
    assert not made._nested.num_tokens


def test_nothing_runs_nested_unless_all_have_places_and_none_is_more_urgent() -> None:
    made, speed = running(100, 100, 100), NESTS._replace(max_running=4)
    assert predict(made, work(10), 0.25, speed) == (0.25, 0.35)
    join(made, "waits", work(100), 0.25, speed)
    assert predict(made, work(10), 0.25, speed)[0] == 1.0
    made = running(100)
    join(made, "urgent", work(60, priority=-1), 0.25)
    assert predict(made, work(10), 0.25)[0] == 1.0
    assert predict(made, work(10, priority=-1), 0.25) == (0.25, 0.35)


def test_among_several_prompts_the_shorter_rest_counts() -> None:
    assert predict(running(50, 50), work(50), 0.0) == (1.0, 1.5)


def test_what_runs_nested_delays_the_step() -> None:
    made = running(100)
    join(made, "short", work(40), 0.25)
    assert predict(made, work(100), 0.25) == (1.4, 2.4)
    assert predict(made, work(100), 0.5) == (1.4, 2.4)
    assert (made.num_tokens, made.num_reported) == (140, 140)
    made.computed("short", ROOM, 0.6)  # a little sooner than predicted
    assert (made.num_tokens, made.num_reported) == (100, 100)
    assert predict(made, work(100), 0.6) == (1.35, 2.35)
    assert predict(made, work(5), 1.0) == (1.0, 1.05)  # a third is left
    made.computed("0", ROOM, 1.3)
    assert len(made) == 0
    assert not made.is_computing


def test_a_late_token_delays_the_step_further() -> None:
    made = running(100)
    join(made, "short", work(40), 0.25)
    made.computed("short", ROOM, 0.75)
    assert predict(made, work(100), 0.8) == (1.5, 2.5)


def test_nested_prompts_have_as_many_tokens_as_the_step() -> None:
    made = running(100)
    for number, now_s in ((1, 0.0), (2, 0.5)):
        assert predict(made, work(50), now_s) == (now_s, now_s + 0.5)
        join(made, f"short {number}", work(50), now_s)
        made.computed(f"short {number}", ROOM, now_s + 0.5)
    assert predict(made, work(1), 1.0) == (2.0, 2.01)


def test_who_comes_during_a_nested_step_is_in_the_next_one() -> None:
    speed = NESTS._replace(model=PrefillModel(0.1, 0.01, 0.0))
    made = running(100)
    join(made, "a", work(20), 0.0, speed)  # until 0.3
    assert predict(made, work(30), 0.1, speed) == (0.3, 0.7)
    join(made, "b", work(30), 0.1, speed)
    assert predict(made, work(20), 0.2, speed) == (0.3, 0.9)  # with the other one
    assert predict(made, work(21), 0.2, speed) == pytest.approx((1.8, 2.11))  # both have no room
    assert predict(made, work(20), 0.4, speed) == (0.7, 1.0)
    join(made, "c", work(20), 0.2, speed)
    made.computed("a", ROOM, 0.5)
    assert predict(made, work(30), 0.6, speed) == (1.1, 1.5)
    for name in "bc":
        made.computed(name, ROOM, 0.9)
    assert predict(made, work(30), 0.9, speed) == (0.9, 1.3)
    assert predict(made, work(31), 0.9, speed)[0] == 2.0  # 1.1 s of the step, 0.9 s of nested ones


def test_a_nested_prompt_that_is_removed_takes_the_rest_of_its_time_with_it() -> None:
    for now_s, ends_s in ((0.3, 1.1), (0.25, 1.05), (0.9, 1.4)):
        made = running(100)
        join(made, "short", work(40), 0.2)
        made.remove("short", ROOM, now_s)
        assert predict(made, work(100), 0.9)[0] == ends_s
        assert made.num_tokens == 100
    made = running(100)
    for name in "abc":
        join(made, name, work(20), 0.0)
    made.remove("b", ROOM, 0.1)
    assert predict(made, work(20), 0.1) == (0.2, 0.6)
    assert predict(made, work(100), 0.1)[0] == 1.4
    made.remove("0", ROOM, 0.1)  # a step of the others begins
    assert predict(made, work(100), 0.1)[0] == 0.5


def test_who_did_not_run_nested_is_in_the_step_after() -> None:
    made = running(100)
    join(made, "short", work(40), 0.25)
    made.computed("0", ROOM, 0.9)
    assert predict(made, work(100), 0.9) == (1.3, 2.3)
    made = running(250)
    join(made, "short", work(40), 0.25)
    made.advance(NESTS, 0.0, 1.3)
    assert made.num_tokens == 290
    made.advance(NESTS, 0.0, 1.5)  # the first step was over at 1.4
    assert made.num_tokens == 190


def test_a_prompt_that_came_during_the_step_and_is_computed_leaves_it_running() -> None:
    made = running(100)
    join(made, "unforeseen", work(60), 0.25)
    assert predict(made, work(100), 0.3)[0] == 1.0
    made.computed("unforeseen", ROOM, 0.5)
    assert made.num_tokens == 100
    assert predict(made, work(100), 0.5) == (1.0, 2.0)
    made.computed("nobody", ROOM, 0.5)
    made = running(100, 100)
    made.computed("1", ROOM, 0.5)  # a step that is not known
    assert predict(made, work(100), 0.5) == (1.5, 2.5)


def test_busy_neighbours_slow_nested_prompts_and_the_step() -> None:
    speed = NESTS._replace(contention=1.0)
    made = running(100)  # until 2, beside one
    assert predict(made, work(50), 0.9, speed, past_busy=1.0) == (0.9, 1.4)
    found = made.predict(work(50), speed, beside({7: [(0.0, 9.0)]}), 1.0, 0.0, 0.9, no_decodes())
    assert found.ends_s == pytest.approx(1.9)
    join(made, "short", work(50), 0.9, speed, 1.0)
    assert made._nested.seconds == pytest.approx(1.0)
    assert predict(made, work(27), 1.9, speed, past_busy=1.0) == (1.9, 2.17)  # more than half is left


def test_what_is_left_behind_a_nested_prompt_is_told() -> None:
    made = running(100, 70)
    join(made, "short", work(20), 0.0)
    assert made.predict(work(10), NESTS, NOBODY, 0.0, 0.0, 0.1, no_decodes()).behind_tokens == 170


newcomer = st.tuples(st.integers(1, 60), st.integers(-1, 1), st.floats(0, 1))
few = st.tuples(st.integers(1, 8), st.just(0), st.floats(0, 0.4))


def scheduled(outer: list[int], newcomers: list[tuple[int, int, float]]) -> tuple[dict[str, float], float]:
    """When each nested prompt has its token, by the engine's scheduler, and when the outer step is over."""
    scheduler = Scheduler(SequenceQueues(PrefixCache(BlockPool(1000), 16, None), 16, SchedulerLimits(STEP, STEP, 64)))

    def add(name: str, order: int, num_tokens: int, priority: int) -> None:
        sampling = SamplingParams(max_tokens=1)
        request = EngineRequest(name, (1,) * num_tokens, sampling, priority=priority, prefill_only=True)
        scheduler.queues.add(Sequence(request, order))

    for number, num_tokens in enumerate(outer):
        add(f"outer {number}", number, num_tokens, 0)
    step = scheduler.schedule()
    step_s = step.num_tokens * NESTS.model.b
    since = order = len(outer)
    ends_s: dict[str, float] = {}
    free_s, nested_s, num_nested, at = 0.0, 0.0, 0, 0
    while at < len(newcomers):
        look_s = max(newcomers[at][2], free_s)
        if look_s >= step_s + nested_s:
            break
        while at < len(newcomers) and newcomers[at][2] <= look_s:
            add(f"new {at}", order, *newcomers[at][:2])
            order, at = order + 1, at + 1
        nested = scheduler.nested(step, 1 - (look_s - nested_s) / step_s, num_nested, since, look_s)
        since, num_nested = order, num_nested + nested_cost(nested.num_tokens, step.num_tokens)
        takes_s = nested.num_tokens * NESTS.model.b
        free_s, nested_s = look_s + takes_s, nested_s + takes_s
        ends_s |= {item.sequence.request_id: free_s for item in nested.scheduled}
    return ends_s, step_s + nested_s


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.lists(newcomer, max_size=1) | st.lists(few, min_size=1, max_size=4),
)
def test_the_scheduler_nests_the_same_prompts(outer: list[int], newcomers: list[tuple[int, int, float]]) -> None:
    """Those that come during a nested step are so short that there is room for all."""
    newcomers = sorted(newcomers, key=lambda one: one[2])
    if len(newcomers) > 1:
        outer = [40, 40, *outer]
    ends_s, outer_s = scheduled(outer, newcomers)
    made = running(*outer)
    for number, (num_tokens, priority, now_s) in enumerate(newcomers):
        if now_s < made._nested.seconds + made.step.num_tokens * NESTS.model.b:
            name, wanted = f"new {number}", work(num_tokens, priority)
            begins_s, predicted_s = predict(made, wanted, now_s)
            if number == len(newcomers) - 1:
                assert begins_s >= outer_s - 1e-5 or predicted_s == pytest.approx(ends_s[name], abs=1e-5)
            join(made, name, wanted, now_s)
    assert sorted(made._nested.request_ids) == sorted(ends_s)
    assert made._nested.seconds + made.step.num_tokens * NESTS.model.b == pytest.approx(outer_s)


prompts = st.builds(
    PromptWork,
    st.integers(1, 40) | st.integers(1, 200),
    st.integers(0, 500),
    st.integers(-1, 1),
    st.sampled_from([-math.inf, -math.inf, 1.0]),
    st.sampled_from([math.inf, math.inf, 50.0]),
)


@given(
    st.lists(st.tuples(prompts, st.floats(0, 0.5), st.sampled_from(["stays", "computed", "removed"])), max_size=12),
    prompts,
    st.tuples(st.floats(0, 0.1), st.floats(0, 0.02), st.floats(0, 1e-4)),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 1.0]),
)
def test_no_prompt_is_done_before_the_earliest_moment(
    events: list[tuple[PromptWork, float, str]],
    wanted: PromptWork,
    model: tuple[float, float, float],
    unread: float,
    cached: float,
    pause_s: float,
    ahead_s: float,
    past_busy: float,
) -> None:
    num_unread = round(unread * (wanted.new_tokens - 1))
    num_cached = round(cached * (wanted.new_tokens - 1 - num_unread))
    least = wanted._replace(
        new_tokens=wanted.new_tokens - num_unread - num_cached,
        known_tokens=wanted.known_tokens + num_cached,
        ready_s=-math.inf,
    )
    speed, made, now_s = Speed(PrefillModel(*model), STEP, 0.5, nests_steps=True), PrefillQueueModel(), 0.0
    for number, (one, later_s, then) in enumerate(events):
        now_s += later_s
        made.advance(speed, past_busy, now_s)
        join(made, str(number), one, now_s, speed, past_busy)
        now_s += later_s / 2
        if then == "computed":
            made.computed(str(number // 2), ROOM, now_s)
        elif then == "removed":
            made.remove(str(number // 3), ROOM, now_s)
        assert made.num_tokens == sum(prompt.new_tokens for prompt in made._prompts.values())
        assert set(made._nested.request_ids) <= set(made.request_ids)
    now_s += pause_s
    made.advance(speed, past_busy, now_s)
    earliest_s = made.earliest_s(least, speed, ahead_s, now_s, past_busy)
    found = made.predict(wanted, speed, ColocatedWorkers({}), past_busy, ahead_s, now_s, no_decodes())
    assert now_s <= found.begins_s <= found.ends_s
    assert 0 <= found.behind_tokens <= made.num_tokens
    assert now_s <= earliest_s <= found.ends_s + 1e-9


@pytest.mark.parametrize(("role", "queue_s"), [("prefill", 0.0), ("both", 0.75)])
def test_only_workers_that_hand_prompts_over_nest_them(role: Role, queue_s: float) -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    worker = replace(P, contention=0.0, nests_steps=True, role=role, chunk_tokens=100)
    placement = at(view, worker, D)
    courses.join("long", view, placement, 100, 10, 0, 0.0)
    assert courses.refine(view, placement, 40, 0, 0.25).queue_s == pytest.approx(queue_s)
    short = PromptWork(40, 0, 0, -math.inf)
    assert courses.earliest_s(view, 0, short, 0.25) == pytest.approx(queue_s + 0.4)
    courses.join("short", view, placement, 40, 10, 0, 0.25)
    assert courses.refine(view, placement, 100, 0, 0.25).queue_s == pytest.approx(1.15 if role == "prefill" else 0.75)
    courses.computed("short", 0.65)
    assert courses.refine(view, placement, 100, 0, 0.65).queue_s == pytest.approx(0.75 if role == "prefill" else 1.0)
