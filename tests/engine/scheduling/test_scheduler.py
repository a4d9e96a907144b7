"""Every step keeps its budget, blocks are never shared by accident, and every sequence finishes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.restore_order import Restore, RestoreOrder
from halfmoon.engine.scheduling.schedule import Schedule, SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.errors import NoCapacity
from halfmoon.kv.kv_policy import parse_kv_policy, policy_salt
from halfmoon.policy.models.chunk_length import ChunkRule
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.models.learned_chunk_rule import LearnedChunkRule

BLOCK_TOKENS = 4


def make(num_blocks: int = 16, **limits: int) -> tuple[Scheduler, PrefixCache]:
    cache = PrefixCache(BlockPool(num_blocks), BLOCK_TOKENS, None)
    chosen: dict[str, Any] = {"max_batch_tokens": 32, "max_running": 8, **limits}
    return Scheduler(SequenceQueues(cache, BLOCK_TOKENS, SchedulerLimits(**chosen))), cache


def sequence(
    order: int, prompt: int, max_tokens: int = 1, priority: int = 0, prompt_logprobs: int | None = None
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=prompt_logprobs)
    return Sequence(EngineRequest(f"r{order}", tuple(range(prompt)), sampling, priority=priority), order)


def advance(scheduler: Scheduler, schedule: Schedule) -> list[Sequence]:
    """What the engine does after a step: counts, a new token each, and the finished leave."""
    finished = []
    for item in schedule.scheduled:
        samples = item.samples
        item.sequence.num_computed += item.num_tokens
        if samples:
            item.sequence.token_ids.append(0)
            if item.sequence.num_output == item.sequence.sampling.max_tokens:
                scheduler.queues.remove(item.sequence)
                finished.append(item.sequence)
    return finished


def tokens(schedule: Schedule) -> dict[str, int]:
    return {item.sequence.request_id: item.num_tokens for item in schedule.scheduled}


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 1), st.integers(0, 10), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    stream=st.none() | st.tuples(st.integers(1, 16), st.integers(2, 12)),
    transfer_steps=st.integers(0, 3),
    num_blocks=st.integers(11, 24),
    max_batch_tokens=st.integers(9, 40),
    chunk_tokens=st.integers(1, 12),
    max_running=st.integers(1, 8),
)
def test_every_sequence_finishes_within_the_limits(
    requests: list[tuple[int, int, int, int, bool]],
    stream: tuple[int, int] | None,
    transfer_steps: int,
    num_blocks: int,
    max_batch_tokens: int,
    chunk_tokens: int,
    max_running: int,
) -> None:
    """Some are added and some handed over, while a `stream` of later hand-overs takes whatever it can get."""
    scheduler, cache = make(
        num_blocks, max_batch_tokens=max_batch_tokens, chunk_tokens=chunk_tokens, max_running=max_running
    )
    coming = [
        (at, sequence(i, prompt, new + handed_over, priority), handed_over)
        for i, (prompt, new, priority, at, handed_over) in enumerate(requests)
    ]
    offered = [one for _, one, handed_over in coming if handed_over]
    mine = {one.request_id for _, one, _ in coming}
    started: dict[int, list[Sequence]] = {}
    finished: list[Sequence] = []
    num_streamed = 0
    for step in range(2000):
        for at, arriving, handed_over in coming:
            if at == step and not handed_over:
                scheduler.queues.add(arriving)
        reserved = [one for at, one, _ in coming if at <= step and one in offered and try_to_reserve(scheduler, one)]
        offered = [one for one in offered if one not in reserved]
        while stream and mine and not offered:
            one = sequence(len(requests) + num_streamed, *stream, priority=1)
            if not try_to_reserve(scheduler, one):
                break
            num_streamed += 1
            reserved.append(one)
        started[step + transfer_steps] = reserved
        for one in started.pop(step, []):
            scheduler.queues.start(one, 0)
        schedule = scheduler.schedule()
        check_step(scheduler, schedule, max_batch_tokens, chunk_tokens, max_running)
        assert len(scheduler.queues.waiting) <= len(requests) + max_running
        finished += advance(scheduler, schedule)
        mine -= {one.request_id for one in finished}
        if len(finished) == len(requests) + num_streamed:
            break
    assert len({one.request_id for one in finished}) == len(requests) + num_streamed
    assert cache.num_available == num_blocks
    cache.check_integrity()


def try_to_reserve(scheduler: Scheduler, one: Sequence) -> bool:
    try:
        scheduler.queues.reserve(one)
    except NoCapacity:
        return False
    return True


def check_step(
    scheduler: Scheduler, schedule: Schedule, max_batch_tokens: int, chunk_tokens: int, max_running: int
) -> None:
    counts = [item.num_tokens for item in schedule.scheduled]
    assert sum(counts) <= max_batch_tokens
    assert all(count >= 1 for count in counts)
    assert counts[: schedule.num_decode_seqs] == [1] * schedule.num_decode_seqs
    if schedule.num_decode_seqs:
        assert sum(counts[schedule.num_decode_seqs :]) <= chunk_tokens
    assert len(scheduler.queues.running) <= max_running
    assert (
        schedule.scheduled or schedule.num_preempted or scheduler.queues.num_reserved or not scheduler.queues.has_work()
    )
    held = [block for other in scheduler.queues.running for block in other.blocks]
    assert len(held) == len(set(held))
    for item in schedule.scheduled:
        assert len(item.sequence.blocks) * BLOCK_TOKENS >= item.sequence.num_computed + item.num_tokens
    assert not any(other.blocks for other in scheduler.queues.waiting)


def test_a_long_prompt_is_cut_and_decodes_go_on_beside_it() -> None:
    scheduler, _ = make(chunk_tokens=6)
    scheduler.queues.add(sequence(0, 3, max_tokens=9))
    advance(scheduler, scheduler.schedule())
    scheduler.queues.add(sequence(1, 20))
    steps = []
    for _ in range(4):
        schedule = scheduler.schedule()
        steps.append(tokens(schedule))
        advance(scheduler, schedule)
    assert steps == [{"r0": 1, "r1": 6}, {"r0": 1, "r1": 6}, {"r0": 1, "r1": 6}, {"r0": 1, "r1": 2}]


def test_without_decodes_a_prompt_fills_the_batch() -> None:
    scheduler, _ = make(chunk_tokens=6)
    scheduler.queues.add(sequence(0, 20))
    scheduler.queues.add(sequence(1, 20))
    assert tokens(scheduler.schedule()) == {"r0": 20, "r1": 12}


def test_a_running_prompt_goes_on_while_another_waits_before_it() -> None:
    scheduler, _ = make(max_running=1)
    scheduler.queues.add(sequence(1, 40))
    advance(scheduler, scheduler.schedule())
    scheduler.queues.add(sequence(0, 4))
    assert tokens(scheduler.schedule()) == {"r1": 8}


def test_a_long_prompt_shares_a_step_with_shorter_ones_behind_it() -> None:
    scheduler, _ = make(num_blocks=64)
    for order, prompt in enumerate((100, 10, 9)):
        scheduler.queues.add(sequence(order, prompt))
    steps = []
    for _ in range(3):
        schedule = scheduler.schedule()
        steps.append(tokens(schedule))
        advance(scheduler, schedule)
    assert steps == [{"r0": 9, "r2": 9}, {"r0": 10, "r1": 10}, {"r0": 32}]  # each waits for what is shorter than itself


def test_a_short_prompt_waits_for_a_quarter_of_a_step_behind_any_number_of_long_ones() -> None:
    scheduler, _ = make(num_blocks=512)
    for order in range(6):
        scheduler.queues.add(sequence(order, 100))
    scheduler.queues.add(sequence(6, 5))
    assert tokens(scheduler.schedule()) == {"r0": 8, "r6": 5}


def test_a_prompt_that_has_half_of_a_step_is_not_long() -> None:
    scheduler, _ = make(num_blocks=64)
    for order, prompt in enumerate((16, 5)):
        scheduler.queues.add(sequence(order, prompt))
    assert tokens(scheduler.schedule()) == {"r0": 16, "r1": 5}


@pytest.mark.parametrize(
    ("behind", "num_blocks", "max_running"),
    [((9, 1), 64, 8), ((100, 0), 64, 8), ((9, 0), 25, 8), ((9, 0), 64, 1)],
    ids=["less urgent", "as long", "no blocks", "no place"],
)
def test_a_long_prompt_yields_to_nobody_else(behind: tuple[int, int], num_blocks: int, max_running: int) -> None:
    scheduler, _ = make(num_blocks=num_blocks, max_running=max_running)
    scheduler.queues.add(sequence(0, 100))
    scheduler.queues.add(sequence(1, behind[0], priority=behind[1]))
    assert tokens(scheduler.schedule()) == {"r0": 32}


def test_what_is_cached_of_a_shorter_prompt_does_not_make_it_longer() -> None:
    cache = PrefixCache(BlockPool(200), BLOCK_TOKENS, lambda salt: b"root")
    scheduler = Scheduler(SequenceQueues(cache, BLOCK_TOKENS, SchedulerLimits(max_batch_tokens=32, max_running=8)))
    first = sequence(0, 80, max_tokens=9)
    scheduler.queues.add(first)
    while first.num_uncomputed > 1:
        advance(scheduler, scheduler.schedule())
    cache.insert(first)
    scheduler.queues.remove(first)
    long = EngineRequest("long", (999,) * 60, SamplingParams(max_tokens=1))
    scheduler.queues.add(Sequence(long, 1))
    for order in range(2, 6):
        scheduler.queues.add(sequence(order, 80 + order))  # longer than the long one, but for what is cached
    assert tokens(scheduler.schedule()) == {"long": 14, "r2": 2, "r3": 3, "r4": 4, "r5": 5}


def test_a_long_prompt_shares_with_nobody_whose_turn_it_is_not() -> None:
    scheduler, _ = make(num_blocks=35, max_batch_tokens=40)
    paused = replace(sequence(0, 32, max_tokens=40).request, priority=1, class_priority=1, max_pause_s=1.0)
    scheduler.queues.add(Sequence(paused, 0))
    for now_s in (0.0, 1.0):
        advance(scheduler, scheduler.schedule(now_s))
    scheduler.queues.add(sequence(1, 120))
    for now_s in (2.0, 9.0):
        schedule = scheduler.schedule(now_s)
        assert tokens(schedule) == {"r1": 40}
        advance(scheduler, schedule)
        if now_s == 2.0:
            assert [one.request_id for one in scheduler.queues.paused] == ["r0"]
            scheduler.queues.add(sequence(2, 5))  # behind the paused answer, which has risen by the next step


def test_a_prompt_whose_policy_takes_no_part_shares_with_nobody() -> None:
    scheduler, _ = make(num_blocks=64)
    h2o = parse_kv_policy("h2o:4+4")
    chosen = Sequence(replace(sequence(0, 30).request, tenant_salt=policy_salt(h2o, b"")), 0)
    scheduler.queues.add(chosen)
    scheduler.queues.add(sequence(1, 2))
    assert chosen.num_at_once(8) > 8
    assert tokens(scheduler.schedule()) == {"r0": 30, "r1": 2}


def test_a_prompt_for_which_other_workers_wait_shares_only_what_it_cannot_use() -> None:
    for layers_at_once, expected in ((0, {"r0": 8, "r1": 2}), (1, {"r0": 30, "r1": 2})):
        scheduler, _ = make(num_blocks=64)
        order = RestoreOrder(9, 0, lambda *_: None, layers_at_once=layers_at_once)
        restore = Restore(order)
        restore.give_up(range(9))
        scheduler.queues.add(Sequence(sequence(0, 30).request, 0, restore))
        scheduler.queues.add(sequence(1, 2))
        assert tokens(scheduler.schedule()) == expected


def test_a_prompt_that_loads_blocks_runs_all_it_can_beside_a_long_one() -> None:
    scheduler, _ = make(num_blocks=100, max_batch_tokens=40, chunk_tokens=4)
    scheduler.queues.add(sequence(0, 150))
    restore = Restore(RestoreOrder(15, 4, lambda *_: None))  # four blocks are computed, the others awaited
    scheduler.queues.add(Sequence(sequence(1, 70).request, 1, restore))
    assert tokens(scheduler.schedule()) == {"r0": 16, "r1": 16}


def test_a_prompt_is_as_long_as_its_log_probabilities_let_it_run() -> None:
    scheduler, _ = make(num_blocks=300, max_batch_tokens=600)
    scheduler.queues.add(sequence(0, 400, prompt_logprobs=0))
    scheduler.queues.add(sequence(1, 50))
    assert tokens(scheduler.schedule()) == {"r0": 256, "r1": 50}


def test_prompts_with_log_probabilities_share_the_logits_of_a_step() -> None:
    scheduler, _ = make(num_blocks=300, max_batch_tokens=1_000)
    for order in range(3):
        scheduler.queues.add(sequence(order, 200, prompt_logprobs=0))
    scheduler.queues.add(sequence(3, 100))
    steps = []
    while scheduler.queues.has_work():
        step = scheduler.schedule()
        steps.append(tokens(step))
        assert sum(item.num_logits for item in step.scheduled if item.sequence.needs_all_outputs) <= 256
        advance(scheduler, step)
    assert steps == [{"r0": 200, "r1": 56, "r3": 100}, {"r1": 144, "r2": 112}, {"r2": 88}]


def test_priority_goes_before_arrival() -> None:
    scheduler, _ = make(max_running=1)
    scheduler.queues.add(sequence(0, 4, priority=1))
    scheduler.queues.add(sequence(1, 4, priority=0))
    assert tokens(scheduler.schedule()) == {"r1": 4}


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    scheduler, _ = make(num_blocks=4)
    first = sequence(0, 8, max_tokens=3)
    scheduler.queues.add(first)
    advance(scheduler, scheduler.schedule())
    scheduler.queues.add(sequence(1, 16))
    scheduler.queues.add(sequence(2, 1))
    schedule = scheduler.schedule()
    assert tokens(schedule) == {"r0": 1}
    while not advance(scheduler, schedule):
        schedule = scheduler.schedule()
    assert tokens(scheduler.schedule()) == {"r1": 16}


def test_the_latest_arrival_is_preempted_and_starts_over() -> None:
    scheduler, cache = make(num_blocks=4)
    early, late = sequence(0, 8, max_tokens=9), sequence(1, 8, max_tokens=9)
    scheduler.queues.add(early)
    scheduler.queues.add(late)
    advance(scheduler, scheduler.schedule())
    schedule = scheduler.schedule()  # both need a third block, and there is none
    assert schedule.num_preempted == 1
    assert tokens(schedule) == {"r0": 1}
    assert late.state == "waiting"
    assert late.num_uncomputed == 9
    assert cache.num_available == 1


def test_a_reservation_holds_blocks_until_it_starts_or_goes() -> None:
    scheduler, cache = make(num_blocks=4)
    reserved = sequence(0, 8, max_tokens=4)
    scheduler.queues.reserve(reserved)
    assert cache.num_available == 1  # eight tokens and the next one
    assert not scheduler.queues.has_work()
    with pytest.raises(NoCapacity):
        scheduler.queues.reserve(sequence(1, 8))
    scheduler.queues.start(reserved, 5)
    schedule = scheduler.schedule()
    assert tokens(schedule) == {"r0": 1}
    assert schedule.num_decode_seqs == 1
    scheduler.queues.remove(reserved)
    assert cache.num_available == 4


def test_a_preempted_sequence_goes_before_later_reservations() -> None:
    scheduler, cache = make(num_blocks=4)
    early, late = sequence(0, 7, max_tokens=9), sequence(1, 7, max_tokens=3)
    for one in (early, late):
        scheduler.queues.reserve(one)
        scheduler.queues.start(one, 0)
    while late.state == "running":
        advance(scheduler, scheduler.schedule())
    assert cache.num_available == 1
    with pytest.raises(NoCapacity, match="wait"):  # there is a block for it, but then `late` would wait longer
        scheduler.queues.reserve(sequence(2, 3))
    while late.state == "waiting":
        advance(scheduler, scheduler.schedule())
    assert early.num_output == 9


def test_a_sequence_that_waits_for_its_turn_only_is_no_reason_to_refuse() -> None:
    scheduler, _ = make()
    scheduler.queues.add(sequence(0, 40))
    scheduler.queues.add(sequence(1, 4, priority=1))
    assert tokens(scheduler.schedule()) == {"r0": 32}
    scheduler.queues.reserve(sequence(2, 4))


def test_when_nobody_waits_any_more_reservations_are_taken_again() -> None:
    scheduler, cache = make(num_blocks=3)
    running, waiting = sequence(0, 8, max_tokens=2), sequence(1, 8)
    scheduler.queues.add(running)
    scheduler.queues.add(waiting)
    scheduler.schedule()
    with pytest.raises(NoCapacity):
        scheduler.queues.reserve(sequence(2, 1))
    scheduler.queues.remove(waiting)
    scheduler.queues.remove(running)
    scheduler.queues.reserve(sequence(2, 1))
    assert cache.num_available == 2


def test_a_held_sequence_keeps_its_blocks_and_is_not_preempted() -> None:
    scheduler, cache = make(num_blocks=2)
    held = sequence(0, 8)
    scheduler.queues.add(held)
    scheduler.schedule()
    held.num_computed = 8
    scheduler.queues.hold(held)
    scheduler.queues.add(sequence(1, 4))
    assert not scheduler.schedule().scheduled
    assert scheduler.queues.has_work()
    scheduler.queues.remove(held)
    assert tokens(scheduler.schedule()) == {"r1": 4}
    assert cache.num_available == 1


STEEP, FLAT = StepModel(0.005, 0.002, 0.0), StepModel(0.02, 0.0002, 0.0)


def moved_in(order: int, prompt: int, num_output: int) -> Sequence:
    request = EngineRequest(f"r{order}", tuple(range(prompt)), SamplingParams(40), output_token_ids=(0,) * num_output)
    return Sequence(request, order)


def with_decodes(model: StepModel, number: int) -> Scheduler:
    scheduler, _ = make(64)
    scheduler.chunk_rule = LearnedChunkRule(ChunkRule(PrefillModel(0.005, 0.002, 0.0), model))
    for order in range(number):
        one = sequence(order, 4, 40)
        scheduler.queues.reserve(one)
        scheduler.queues.start(one, 0)
    return scheduler


@pytest.mark.parametrize(("model", "number", "runs_alone"), [(STEEP, 6, True), (STEEP, 1, False), (FLAT, 6, False)])
def test_an_answer_that_moves_here_goes_ahead_where_two_steps_take_little_longer_than_one(
    model: StepModel, number: int, runs_alone: bool
) -> None:
    scheduler = with_decodes(model, number)
    scheduler.queues.add(moved_in(9, 2, 2))
    schedule = scheduler.schedule()
    assert (set(tokens(schedule)) == {"r9"}) == runs_alone
    assert len(schedule.scheduled) == (1 if runs_alone else number + 1)
    assert schedule.num_decode_seqs == (0 if runs_alone else number)
    advance(scheduler, schedule)
    assert len(scheduler.schedule().scheduled) == number + 1


def test_decodes_wait_for_one_step_only_and_for_answers_alone() -> None:
    scheduler = with_decodes(STEEP, 6)
    scheduler.queues.add(moved_in(8, 2, 2))
    advance(scheduler, scheduler.schedule())
    scheduler.queues.add(moved_in(9, 2, 2))
    schedule = scheduler.schedule()
    assert schedule.num_decode_seqs == 7
    advance(scheduler, schedule)
    for one in (sequence(10, 4, 40), moved_in(11, 20, 2)):
        scheduler.queues.add(one)
        assert scheduler.schedule().num_decode_seqs == 8
        scheduler.queues.remove(one)
