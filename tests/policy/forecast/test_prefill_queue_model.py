"""The steps of a prefill worker, foreseen: as its scheduler forms them, beside busy neighbours."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.policy.forecast.colocated_decodes import NO_DECODES, ColocatedDecodes, DecodeIntervals
from halfmoon.policy.forecast.colocated_workers import ColocatedWorkers, Decoding
from halfmoon.policy.forecast.prefill_queue_model import PrefillQueueModel
from halfmoon.policy.forecast.prefill_step import PromptWork, Speed, StepRoom
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule, StepDecodes
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.models.learned_chunk_rule import LearnedChunkRule
from tests.policy.busy_host import beside
from tests.policy.sequences import lives

STEP = 100
ROOM = StepRoom(STEP, STEP)
SPEED = Speed(PrefillModel(0.0, 0.01, 0.0), STEP)  # a second a full step
NOBODY = ColocatedWorkers({})


def work(num_tokens: int, priority: int = 0, ready_s: float = -math.inf) -> PromptWork:
    return PromptWork(num_tokens, 0, priority, ready_s)


def course(*prompts: int) -> PrefillQueueModel:
    made = PrefillQueueModel()
    for number, num_tokens in enumerate(prompts):
        made.join(str(number), work(num_tokens), None, ROOM, 0.0, SPEED)
    return made


def no_decodes() -> ColocatedDecodes:
    return ColocatedDecodes(-1, NO_DECODES, StepModel())


class When(NamedTuple):
    begins_s: float
    ends_s: float


def predict(
    made: PrefillQueueModel,
    wanted: PromptWork,
    now_s: float = 0.0,
    speed: Speed = SPEED,
    neighbours: ColocatedWorkers = NOBODY,
) -> When:
    found = made.predict(wanted, speed, neighbours, 0.0, 0.0, now_s, no_decodes())
    return When(round(found.begins_s, 6), round(found.ends_s, 6))


def test_every_step_has_its_fixed_cost() -> None:
    speed = Speed(PrefillModel(0.5, 0.01, 0.0), STEP)
    assert predict(PrefillQueueModel(), work(250), speed=speed) == (0.0, 3 * 0.5 + 2.5)


def test_what_comes_before_is_computed_first() -> None:
    made = course(100, 50)
    assert predict(made, work(50)) == (1.0, 2.0)  # in one step with the second
    assert predict(made, work(50), now_s=0.5) == (1.0, 2.0)
    made.computed("0", ROOM, 0.9)  # sooner than predicted
    assert predict(made, work(50), now_s=0.9) == (1.4, 1.9)  # not into the step that has begun
    made.computed("1", ROOM, 1.4)
    made.computed("1", ROOM, 1.5)
    assert len(made) == 0


waiting = st.builds(
    PromptWork,
    st.integers(1, 400),
    st.integers(0, 2_000),
    st.integers(-1, 1),
    st.sampled_from([-math.inf, 1.0, 3.0]),
    st.sampled_from([math.inf, 50.0, 1_000.0]),
)


@given(
    st.lists(waiting, max_size=8),
    waiting,
    st.floats(0, 6),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.tuples(st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 1e-4)),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_no_prompt_is_done_before_the_earliest_moment(
    prompts: list[PromptWork],
    wanted: PromptWork,
    now_s: float,
    ahead_s: float,
    in_chunks: bool,
    model: tuple[float, float, float],
    unread: float,
    cached: float,
) -> None:
    num_unread = round(unread * (wanted.new_tokens - 1))
    num_cached = round(cached * (wanted.new_tokens - 1 - num_unread))
    least = wanted._replace(
        new_tokens=wanted.new_tokens - num_unread - num_cached, known_tokens=wanted.known_tokens + num_cached
    )
    speed = Speed(PrefillModel(*model), STEP, 0.5, 2 * STEP if in_chunks else 0)
    made = PrefillQueueModel()
    for number, one in enumerate(prompts):
        made.join(str(number), one, Decoding(1, 2.0, 10) if number % 2 else None, ROOM, 0.0, SPEED)
    made.advance(speed, 1.0, now_s)
    own = ColocatedDecodes(1, lives((2.0, 10)), StepModel(0.1, 0.1, 0.0)) if in_chunks else no_decodes()
    found = made.predict(wanted, speed, ColocatedWorkers({}), 1.0, ahead_s, now_s, own)
    assert made.earliest_s(least, speed, ahead_s, now_s) <= found.ends_s + 1e-9


def test_the_earliest_moment_is_behind_the_step_under_way_and_whoever_goes_first() -> None:
    made = course(100)
    assert made.earliest_s(work(1), SPEED, 0.0, 0.25) == pytest.approx(0.25 + 0.75 + 0.01)
    made.join("long", work(500), None, ROOM, 0.25, SPEED)
    assert made.earliest_s(work(1), SPEED, 0.0, 0.25) == pytest.approx(0.25 + 0.75 + 0.01)  # short ones pass it
    assert made.earliest_s(work(499), SPEED, 0.0, 0.25) == pytest.approx(0.25 + 0.75 + 4.99)
    assert made.earliest_s(work(500), SPEED, 0.0, 0.25) == pytest.approx(0.25 + 0.75 + 5.0 + 5.0)
    assert made.earliest_s(work(1, priority=1), SPEED, 2.0, 0.25) == pytest.approx(0.25 + 0.75 + 2.0 + 5.0 + 0.01)


def test_a_step_that_takes_too_long_is_about_to_end() -> None:
    assert predict(course(100), work(50), now_s=7.0) == (7.05, 7.55)


def test_short_prompts_overtake_a_long_one() -> None:
    made = course(1000)
    assert predict(made, work(30)) == (1.0, 1.6)
    assert predict(made, work(90)) == (1.0, 2.8)  # half of each step
    made.advance(SPEED, 0.0, 5.5)
    assert predict(made, work(90), now_s=5.5) == (6.0, 7.8)
    assert made.num_tokens == 500


def test_priority_goes_before_order() -> None:
    assert predict(course(100, 100), work(100, priority=-1)) == (1.0, 2.0)
    assert predict(course(100, 100), work(100, priority=1)) == (2.0, 3.0)


def test_who_waits_for_what_is_restored_lets_others_pass() -> None:
    made = PrefillQueueModel()
    made.join("restored", work(100, ready_s=5.0), None, ROOM, 0.0, SPEED)
    assert predict(made, work(50)) == (0.0, 0.5)
    assert predict(PrefillQueueModel(), work(50, ready_s=3.0)) == (3.0, 3.5)


def test_who_was_restored_meanwhile_is_computed_since_then() -> None:
    made = PrefillQueueModel()
    made.join("restored", work(250, ready_s=5.0), None, ROOM, 0.0, SPEED)
    made.advance(SPEED, 0.0, 4.0)
    assert predict(made, work(50), now_s=4.0) == (4.0, 4.5)  # nobody waits for it yet
    made.advance(SPEED, 0.0, 6.5)
    assert made.num_tokens == 150  # the first step was over at 6, the second one is under way
    assert predict(made, work(1000, priority=1), now_s=6.5) == (7.0, 17.5)


def test_one_that_is_taken_away_takes_its_time_with_it() -> None:
    made = course(100, 100)
    made.remove("1", ROOM, 0.5)
    assert predict(made, work(50), now_s=0.5) == (1.0, 1.5)
    made.remove("nobody", ROOM, 0.5)


def test_what_is_far_ahead_is_summed_up() -> None:
    speed = SPEED._replace(model=PrefillModel(0.5, 0.01, 0.0))
    assert predict(PrefillQueueModel(), work(10**6), speed=speed) == (0.0, 1.5 * 10**4)
    assert predict(course(*[100] * 2000), work(100), speed=speed) == pytest.approx((3000.0, 3001.5))
    few = course(*[1] * 5000)
    few.join("behind", work(1, priority=1), None, ROOM, 0.0, SPEED)
    found = few.predict(work(1), speed, NOBODY, 0.0, 0.0, 0.0, no_decodes())
    assert found.ends_s == pytest.approx(51 * 0.5 + 50.01)
    assert found.behind_tokens == 1
    ten = speed._replace(max_running=10)
    assert predict(few, work(1), speed=ten).ends_s == pytest.approx(501 * 0.5 + 50.01)


def test_busy_neighbours_slow_it_down_as_long_as_they_are() -> None:
    speed = SPEED._replace(contention=1.0)
    made = PrefillQueueModel()
    for spans, ends_s in (({}, 1.0), ({7: [(0.0, 9.0)]}, 2.0), ({7: [(0.0, 1.0)]}, 1.5), ({7: [(0.5, 0.7)]}, 1.1)):
        found = made.predict(work(100), speed, beside(spans), 0.0, 0.0, 0.0, no_decodes())
        assert found.ends_s == pytest.approx(ends_s)
    both = beside({7: [(0.0, 9.0)], 8: [(0.0, 9.0)]})
    assert predict(made, work(100), 0.0, speed, both) == (0.0, 3.0)


def test_what_is_computed_before_makes_a_neighbour_busy() -> None:
    made = PrefillQueueModel()
    made.join("first", work(100), Decoding(7, 10.0), ROOM, 0.0, SPEED)
    speed = SPEED._replace(contention=1.0)
    assert predict(made, work(100), 0.0, speed, beside({7: []})) == (1.0, 3.0)
    assert predict(made, work(100), 0.0, speed) == (1.0, 2.0)  # it decodes elsewhere


def scheduled_until(
    prompts: list[tuple[int, int]],
    decode_s: float = 0.0,
    rule: ChunkRule = CONSTANT_CHUNKS,
    target_s: float = math.inf,
    places: int = 64,
) -> float:
    """When the last one's token comes, by the engine's scheduler; the first one's step has begun before the others.
    With `decode_s` somebody with that TBT target decodes meanwhile."""
    cache = PrefixCache(BlockPool(1000), 16, None)
    limits = SchedulerLimits(max_batch_tokens=STEP, chunk_tokens=40 if decode_s else STEP, max_running=places)
    scheduler = Scheduler(SequenceQueues(cache, 16, limits))
    scheduler.chunk_rule = LearnedChunkRule(rule)
    now_s = 0.0
    if decode_s:
        request = EngineRequest("decoding", (1,), SamplingParams(max_tokens=999), tbt_target_s=target_s)
        decoding = Sequence(request, 99)
        scheduler.queues.reserve(decoding)
        scheduler.queues.start(decoding, 1)
    for number, (num_tokens, priority) in enumerate(prompts):
        request = EngineRequest(str(number), (1,) * num_tokens, SamplingParams(max_tokens=1), priority=priority)
        scheduler.queues.add(Sequence(request, number))
        if number == 0:
            first = scheduler.schedule()
    step = first
    while True:
        prompt_items = [item for item in step.scheduled if item.sequence.request_id != "decoding"]
        now_s += SPEED.model.b * sum(item.num_tokens for item in prompt_items) + decode_s
        for item in prompt_items:
            item.sequence.num_computed += item.num_tokens
            assume(item.sequence.num_uncomputed != 1)  # the scheduler counts it as a decode
            if not item.sequence.num_uncomputed:
                scheduler.queues.remove(item.sequence)
                if item.sequence.request_id == str(len(prompts) - 1):
                    return now_s
        step = scheduler.schedule()


@given(st.lists(st.tuples(st.integers(1, 175).map(lambda half: 2 * half), st.integers(-1, 1)), min_size=2, max_size=12))
def test_steps_are_those_of_the_scheduler(prompts: list[tuple[int, int]]) -> None:
    made = PrefillQueueModel()
    for number, (num_tokens, priority) in enumerate(prompts[:-1]):
        made.join(str(number), work(num_tokens, priority), None, ROOM, 0.0, SPEED)
    assert predict(made, work(*prompts[-1])).ends_s == pytest.approx(scheduled_until(prompts))


@given(st.lists(st.integers(1, 175).map(lambda half: 2 * half), min_size=2, max_size=12), st.integers(1, 4))
def test_steps_have_as_many_prompts_as_those_of_the_scheduler(lengths: list[int], places: int) -> None:
    made, speed = PrefillQueueModel(), SPEED._replace(max_running=places)
    for number, num_tokens in enumerate(lengths[:-1]):
        made.join(str(number), work(num_tokens), None, StepRoom(STEP, STEP, places), 0.0, SPEED)
    found = predict(made, work(lengths[-1]), speed=speed)
    assert found.ends_s == pytest.approx(scheduled_until([(length, 0) for length in lengths], places=places))


@given(
    st.lists(
        st.tuples(st.integers(1, 9).map(lambda chunks: CHUNK * chunks), st.integers(-1, 1)), min_size=2, max_size=3
    )
)
def test_steps_beside_decoding_are_those_of_the_scheduler(prompts: list[tuple[int, int]]) -> None:
    """Of whole chunks: who has one token left decodes, as far as the scheduler is concerned."""
    made = PrefillQueueModel()
    for number, (num_tokens, priority) in enumerate(prompts[:-1]):
        made.join(str(number), work(num_tokens, priority), None, StepRoom(CHUNK, STEP), 0.0, SPEED)
    own = ColocatedDecodes(0, lives((math.inf, 1.0)), ONE_STEP)
    found = made.predict(work(*prompts[-1]), BOTH, NOBODY, 0.0, 0.0, 0.0, own)
    assert found.ends_s == pytest.approx(scheduled_until(prompts, decode_s=0.1))


@given(
    st.lists(st.tuples(st.integers(1, 20).map(lambda rows: 16 * rows), st.integers(-1, 1)), min_size=2, max_size=3),
    st.sampled_from([0.4, 0.5, 0.6]),
)
def test_steps_beside_targets_are_those_of_the_scheduler(prompts: list[tuple[int, int]], target_s: float) -> None:
    """Chunks of 16 to 80 tokens: they shrink as what is known of the prompt grows."""
    rule = ChunkRule(PrefillModel(0.01, 0.005, 2e-5), ONE_STEP)
    speed, running = (
        BOTH._replace(chunk_rule=rule),
        DecodeIntervals(np.array([math.inf]), np.ones(1), np.array([target_s])),
    )
    made = PrefillQueueModel()
    first = speed.step_room(StepDecodes(1, 1, target_s), 0)
    for number, (num_tokens, priority) in enumerate(prompts[:-1]):
        made.join(str(number), work(num_tokens, priority), None, first, 0.0, SPEED)
    found = made.predict(work(*prompts[-1]), speed, NOBODY, 0.0, 0.0, 0.0, ColocatedDecodes(0, running, ONE_STEP))
    assert found.ends_s == pytest.approx(scheduled_until(prompts, 0.1, rule, target_s))


CHUNK = 40
BOTH = SPEED._replace(chunk_tokens=CHUNK)
ONE_STEP = StepModel(0.1, 0.0, 0.0)


def test_a_worker_that_decodes_too_computes_chunks_beside_its_tokens() -> None:
    found = PrefillQueueModel().predict(
        work(100), BOTH, NOBODY, 0.0, 0.0, 0.0, ColocatedDecodes(0, lives((99.0, 1.0)), ONE_STEP)
    )
    assert found == pytest.approx((0.05, 0.05 + 1.0 + 3 * 0.1, 0))  # half of a decode step, then three chunks
    found = PrefillQueueModel().predict(
        work(100), BOTH, NOBODY, 0.0, 0.0, 0.0, ColocatedDecodes(0, lives((0.4, 1.0)), ONE_STEP)
    )
    assert found == pytest.approx((0.05, 0.05 + 0.5 + 0.6, 0))  # a chunk, and then all of the rest


def test_what_it_computed_before_decodes_beside_a_prompt() -> None:
    made = course(100)
    made.join("second", work(100), Decoding(0, 99.0, 1.0), ROOM, 0.0, SPEED)
    found = made.predict(work(30, priority=1), BOTH, NOBODY, 0.0, 0.0, 0.0, ColocatedDecodes(0, lives(), ONE_STEP))
    assert found == pytest.approx((2.0, 2.4, 0))


def test_what_is_left_behind_a_prompt_is_told() -> None:
    found = course(1000).predict(work(30), SPEED, NOBODY, 0.0, 0.0, 0.0, no_decodes())
    assert found.behind_tokens == 1000 - 100 - 30


def test_steps_with_decoding_are_over_later() -> None:
    made = PrefillQueueModel()
    made.join("long", work(1000), None, StepRoom(CHUNK, STEP), 0.0, SPEED)
    made.advance(BOTH, 0.0, 2.6, 0.1, StepDecodes(1, 1))
    assert made.num_tokens == 1000 - 5 * CHUNK


def test_as_many_prompts_will_come_as_do_half_of_the_times() -> None:
    made = PrefillQueueModel()
    speed = BOTH._replace(model=PrefillModel(0.1, 0.01, 0.0))
    for number in range(12):
        assert number >= 10 or made.usual_work_s(speed, 99.0, float(number)) == 0  # little is known
        made.join(str(number), work(20 if number % 2 else 60), None, ROOM, float(number), SPEED)
    each_s = (0.3 + 0.6 + 0.2) / 2  # 60 tokens are two chunks
    assert made.usual_work_s(speed, 0.6, 12.0) == 0
    assert made.usual_work_s(speed, 0.7, 12.0) == pytest.approx(each_s)
    assert made.usual_work_s(speed, 5.0, 12.0) == pytest.approx(5 * each_s)


def test_prompts_that_usually_come_will_share_the_steps() -> None:
    made = PrefillQueueModel()
    for number in range(21):  # two short ones a second
        made.join(str(number), work(25), None, ROOM, number / 2, SPEED)
        made.computed(str(number), ROOM, number / 2)
    alone, last = PrefillQueueModel(), 10.0
    assert predict(alone, work(400), now_s=last).ends_s == last + 4.0
    assert last + 6.0 <= predict(made, work(400), now_s=last).ends_s <= last + 8.0  # half of what it computes, at most
    assert predict(made, work(20), now_s=last).ends_s == last + 0.2  # who comes later comes later
    few = PrefillQueueModel()
    few.join("a", work(25), None, ROOM, last - 1, SPEED)
    few.computed("a", ROOM, last)
    assert predict(few, work(400), now_s=last).ends_s == last + 4.0  # nothing is known of what will come


@given(
    st.lists(st.tuples(st.floats(0.01, 3), st.integers(1, 300), st.booleans()), max_size=40),
    st.integers(1, 900),
    st.floats(0, 2),
)
def test_a_prediction_is_no_sooner_than_its_own_work(
    events: list[tuple[float, int, bool]], num_tokens: int, contention: float
) -> None:
    made, now_s = PrefillQueueModel(), 0.0
    speed = SPEED._replace(contention=contention)
    for number, (pause_s, length, is_computed) in enumerate(events):
        now_s += pause_s
        made.advance(speed, 1.0, now_s)
        made.join(str(number), work(length), Decoding(7, 1.0), ROOM, now_s, SPEED)
        if is_computed:
            made.computed(str(number // 2), ROOM, now_s)
        else:
            made.remove(str(number // 3), ROOM, now_s)
    found = made.predict(work(num_tokens), speed, beside({7: [(now_s, now_s + 1)]}), 1.0, 0.0, now_s, no_decodes())
    assert now_s <= found.begins_s <= found.ends_s
    assert found.ends_s - now_s >= num_tokens * SPEED.model.b - 1e-9
    most_s = 2 * (num_tokens + made.num_tokens) * SPEED.model.b + 2  # who comes meanwhile has half of each step
    assert found.ends_s - now_s <= (1 + contention) * most_s + 1e-9
