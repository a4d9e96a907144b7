"""Who hears of a prompt that loads a part of itself, and where computing goes on after it."""

from __future__ import annotations

import pytest

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.restore_order import Restore, RestoreOrder
from halfmoon.engine.scheduling.restore_watch import RestoreWatch
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import NotFound

BLOCK = 16


def loading(num_blocks: int, fence: int) -> tuple[Sequence, RestoreWatch, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    order = RestoreOrder(num_blocks, fence, lambda num_tokens, num_loaded: told.append((num_tokens, num_loaded)))
    request = EngineRequest("a", tuple(range(BLOCK * num_blocks + 3)), SamplingParams(max_tokens=4))
    watch = RestoreWatch(BLOCK)
    watch.add("a", order.on_progress)
    return Sequence(request, 0, Restore(order)), watch, told


def test_only_one_with_blocks_is_told_of_and_none_that_is_gone() -> None:
    sequence, watch, told = loading(4, 1)
    watch.tell(sequence)
    assert told == []
    sequence.blocks = [0, 1, 2, 3, 4]
    sequence.num_computed = BLOCK
    watch.tell(sequence)
    watch.forget("a")
    watch.tell(sequence)
    assert told == [(BLOCK, 0)]


def test_computing_goes_on_behind_what_was_loaded() -> None:
    sequence, watch, _ = loading(4, 1)
    sequence.num_computed = BLOCK
    assert watch.note_loaded(sequence, [1, 2], [3])
    assert (sequence.num_computed, sequence.num_loaded) == (3 * BLOCK, 2 * BLOCK)
    sequence.restore = None
    assert not watch.note_loaded(sequence, [3], [])
    assert sequence.num_computed == 3 * BLOCK


def test_a_fence_does_not_go_back_behind_what_is_computed() -> None:
    sequence, watch, _ = loading(4, 1)
    sequence.num_computed = 2 * BLOCK + 1
    assert watch.move_fence(sequence, 0) == 3
    assert watch.move_fence(sequence, 9) == 4
    sequence.restore = None
    with pytest.raises(NotFound):
        watch.move_fence(sequence, 2)
