"""Each sequence is in the queue of its state, whatever becomes of it, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.modelled_sequence import ModelledRequest, ModelledSequence, ModelledToken, State
from halfmoon.sim.sequence_queues import SequenceQueues

STATES: tuple[State, ...] = ("waiting", "prefilling", "decoding", "reserved", "held", "removed")


def sequence(number: int, priority: int = 0) -> ModelledSequence:
    return ModelledSequence(ModelledRequest(f"r{number}", 9, 3, priority=priority), (priority, number), 9)


def test_those_that_wait_have_their_turn_by_rank() -> None:
    queues = SequenceQueues()
    for number, priority in enumerate((1, 0, 1, 0)):
        queues.enter(sequence(number, priority), "waiting")
    assert [one.request.request_id for one in queues.waiting] == ["r1", "r3", "r0", "r2"]
    queues.move(queues.waiting[3], "prefilling")
    queues.move(queues.waiting[0], "decoding")
    assert queues.last_running().request.request_id == "r2"


def test_a_request_is_here_once() -> None:
    queues = SequenceQueues()
    queues.enter(sequence(1), "reserved")
    with pytest.raises(AssertionError):
        queues.enter(sequence(1), "waiting")


def test_tokens_count_on_from_those_that_another_worker_computed() -> None:
    moved = ModelledSequence(ModelledRequest("r", 20, 6, num_done=4), (0, 0), 24)
    assert moved.num_output_left == 2
    assert [moved.append(), moved.append()] == [ModelledToken("r", 4, False), ModelledToken("r", 5, True)]
    assert moved.num_output_left == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(STATES)), max_size=40))
def test_a_sequence_is_in_one_queue_or_gone(moves: list[tuple[int, State]]) -> None:
    queues = SequenceQueues()
    for number, state in moves:
        known = queues.find(f"r{number}")
        if known is not None:
            queues.move(known, state)
        elif state != "removed":
            queues.enter(sequence(number), state)
        here = list(queues)
        for queue, its_state in (
            (queues.waiting, "waiting"),
            (queues.prefilling, "prefilling"),
            (list(queues.decoding), "decoding"),
        ):
            assert sorted(queue) == sorted(one for one in here if one.state == its_state)
            assert its_state == "decoding" or queue == sorted(queue)
        assert queues.num_reserved == sum(one.state == "reserved" for one in here)
        assert queues.num_held == sum(one.state == "held" for one in here)
        assert all(queues.find(one.request.request_id) is one for one in here)
