"""A run of decode steps in closed form equals the same steps one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.latency_sources.host_memory import Cycle
from halfmoon.sim.token_times import gaps, in_order
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.worker.job import Job

CYCLE = Cycle(0.01, 1e-6)
SEQUENCES = st.lists(st.tuples(st.integers(1, 300), st.integers(2, 60)), min_size=1, max_size=8)  # length, outputs


def batch(sequences: list[tuple[int, int]], block_tokens: int = 16) -> DecodeBatch:
    made = DecodeBatch(block_tokens)
    for index, (length, output) in enumerate(sequences):
        job = Job(index, 0.0, length - 1, output, [])
        job.generated, job.first_s = 1, 0.0
        made.add(job, length)
    return made


@given(SEQUENCES, st.integers(1, 16))
def test_blocks_of_a_run_are_those_of_its_sequences(sequences: list[tuple[int, int]], block_tokens: int) -> None:
    decodes = batch(sequences, block_tokens)
    num_steps = decodes.steps_left()
    for first in range(num_steps):
        for last in range(first, num_steps + 1):
            expected = sum(
                (length - 1 + step) % block_tokens == 0 for length, _ in sequences for step in range(first, last)
            )
            assert decodes.new_blocks(first, last) == expected


@given(SEQUENCES, st.integers(0, 40))
def test_affordable_steps_are_as_many_as_blocks_pay_for(sequences: list[tuple[int, int]], num_blocks: int) -> None:
    decodes = batch(sequences)
    most = decodes.steps_left()
    steps = decodes.affordable_steps(most, num_blocks)
    assert 1 <= steps <= most
    assert steps == 1 or decodes.new_blocks(1, steps) <= num_blocks
    assert steps == most or decodes.new_blocks(1, steps + 1) > num_blocks


@given(SEQUENCES)
def test_a_run_gives_every_token_the_time_that_single_steps_give_it(sequences: list[tuple[int, int]]) -> None:
    whole, single = batch(sequences), batch(sequences)
    now_s, ended_whole, ended_single = 0.0, [], []
    while whole.size:
        num_steps = whole.steps_left()
        begun_s = now_s
        for _ in range(num_steps):
            now_s += single.duration_s(1, CYCLE)
            ended_single += single.advance(now_s)
        assert begun_s + whole.duration_s(num_steps, CYCLE) == pytest.approx(now_s)
        ended_whole += whole.advance_run(num_steps, begun_s, CYCLE)
    assert [job.index for job in ended_whole] == [job.index for job in ended_single]
    for ours, theirs in zip(ended_whole, ended_single, strict=True):
        assert ours.num_left == 0
        assert in_order(0.0, ours.later_s) == pytest.approx(in_order(0.0, theirs.later_s))
        assert gaps(0.0, ours.later_s) == pytest.approx(gaps(0.0, theirs.later_s))


@given(SEQUENCES, st.floats(0.0, 0.999))
def test_the_running_step_is_the_one_whose_time_it_is(sequences: list[tuple[int, int]], share: float) -> None:
    decodes = batch(sequences)
    num_steps = decodes.steps_left()
    elapsed_s = share * decodes.duration_s(num_steps, CYCLE)
    step = decodes.steps_begun(elapsed_s, CYCLE)
    assert decodes.duration_s(step, CYCLE) >= elapsed_s
    assert step == 1 or decodes.duration_s(step - 1, CYCLE) < elapsed_s
