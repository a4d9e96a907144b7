"""A prompt of which some blocks are loaded while others are computed: the tokens are those of computing it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.restore_order import Restore, RestoreOrder
from halfmoon.errors import NotFound
from halfmoon.kv.kv_layout import KVSlice

MakeEngine = Callable[..., Engine]


def request(name: str = "a", length: int = 46, **options: Any) -> EngineRequest:
    prompt = torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return EngineRequest(name, tuple(prompt), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True), **options)


def steps(engine: Engine) -> list[int]:
    """Tokens until nothing can be computed."""
    tokens: list[int] = []
    while engine.has_work():
        result = engine.step()
        tokens += [output.token_id for output in result.outputs]
        engine.check_integrity()
        if result.is_empty:
            break
    return tokens


class Loading:
    """A request of 46 tokens in blocks of 4 (11 whole ones), and the KV that it would have if it was computed."""

    def __init__(self, make_engine: MakeEngine, fence: int, **options: Any) -> None:
        source = make_engine(block_tokens=4, num_blocks=32)
        self.block_tokens = source.layout.block_tokens
        source.add(request(prefill_only=True))
        (self.first,) = steps(source)
        self.num_blocks = 44 // self.block_tokens
        self.cells = [
            source.kv_read("a", KVSlice(0, source.layout.num_layers, block * self.block_tokens, self.block_tokens))
            for block in range(self.num_blocks)
        ]
        self.heard: list[tuple[int, int]] = []
        self.engine = make_engine(block_tokens=4, num_blocks=32, **options)
        order = RestoreOrder(self.num_blocks, fence, lambda *progress: self.heard.append(progress))
        self.engine.add(request(), order=order)

    def load(self, *blocks: int) -> None:
        for block in blocks:
            self.engine.load_block("a", block, self.cells[block])
        self.engine.note_loaded("a", blocks)


@pytest.fixture
def expected(make_engine: MakeEngine) -> list[int]:
    engine = make_engine()
    engine.add(request())
    return steps(engine)


def test_what_is_behind_the_fence_is_waited_for(make_engine: MakeEngine, expected: list[int]) -> None:
    it = Loading(make_engine, fence=3, max_batch_tokens=9, max_running=2)
    assert it.heard == [(0, 0)], "it has its blocks at once"
    assert steps(it.engine) == []
    assert it.heard[-1] == (3 * it.block_tokens, 0)
    it.load(*range(it.num_blocks - 1, 3, -1))
    assert steps(it.engine) == []
    it.load(3)
    assert steps(it.engine) == expected
    assert it.heard[-1][1] == (it.num_blocks - 3) * it.block_tokens
    again = it.engine
    again.add(request("b"))
    assert again.step().num_cached_tokens == {"b": 45}, "what was loaded is cached, too, and the token behind it"


def test_everything_can_be_loaded_but_the_last_token(make_engine: MakeEngine, expected: list[int]) -> None:
    it = Loading(make_engine, fence=0)
    it.load(*range(it.num_blocks))
    result = it.engine.step()
    assert result.num_prefill_tokens == 46 - it.num_blocks * it.block_tokens
    assert result.num_cached_tokens == {"a": 0}
    assert [output.token_id for output in result.outputs] + steps(it.engine) == expected


def test_holes_are_computed(make_engine: MakeEngine, expected: list[int]) -> None:
    it = Loading(make_engine, fence=1)
    it.load(2, 5, 6, it.num_blocks - 1)
    it.engine.note_loaded("a", (), (1, 3, 4, *range(7, it.num_blocks - 1)))
    assert steps(it.engine) == expected
    assert it.heard[-1][1] == 4 * it.block_tokens


def test_a_fence_moves_both_ways_but_not_below_what_is_computed(make_engine: MakeEngine, expected: list[int]) -> None:
    it = Loading(make_engine, fence=5)
    assert it.engine.move_fence("a", 4) == 4
    steps(it.engine)
    assert it.engine.move_fence("a", 1) == 4
    assert it.engine.move_fence("a", 6) == 6
    with pytest.raises(NotFound):
        it.load(5)
    assert it.engine.move_fence("a", 99) == it.num_blocks
    assert steps(it.engine) == expected
    with pytest.raises(NotFound):
        it.engine.move_fence("a", 1)
    it.engine.note_loaded("a", (7,))  # too late


def test_only_alone_it_computes_a_little_at_a_time(make_engine: MakeEngine) -> None:
    it = Loading(make_engine, fence=8, chunk_tokens=4, max_batch_tokens=60)
    it.engine.step()
    assert it.heard[-1] == (4, 0)
    it.engine.add(request("b"))
    it.engine.step()
    assert it.heard[-1] == (8 * it.block_tokens, 0), "the other one makes the step a long one in any case"


def test_what_was_preempted_or_cancelled_is_not_loaded(make_engine: MakeEngine) -> None:
    it = Loading(make_engine, fence=5)
    it.engine.cancel("a")
    with pytest.raises(NotFound):
        it.load(7)
    it.engine.note_loaded("a", (7,))
    it.engine.check_integrity()
    assert it.engine.stats().num_free_blocks == it.engine.stats().num_blocks


@given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from("lgf"), st.integers(0, 11)), max_size=30))
def test_a_block_is_computed_waited_for_or_loaded(fence: int, events: list[tuple[str, int]]) -> None:
    restore = Restore(RestoreOrder(12, fence, lambda *_: None))
    given_up: set[int] = set()
    for kind, number in events:
        if kind == "l":
            restore.note_loaded(number)
        elif kind == "g":
            restore.give_up([number])
            given_up.add(number)
        else:
            restore.move_fence(number)
        for block in range(12):
            assert not (restore.is_waited_for(block) and (restore.is_loaded(block) or block < restore.fence))
            assert not (restore.is_waited_for(block) and block in given_up)
            assert (
                restore.is_waited_for(block) or restore.is_loaded(block) or block < restore.fence or block in given_up
            )
            stop = restore.stop(block)
            between = range(block, 12 if stop is None else stop)
            assert not any(restore.is_waited_for(one) or restore.is_loaded(one) for one in between)
    assert {block for start, end in restore.runs(0) for block in range(start, end)} == {
        block for block in range(12) if restore.is_loaded(block)
    }
