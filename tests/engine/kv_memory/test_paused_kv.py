"""KV of paused answers is copied to host memory within bounds; what finds no room there is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.paused_kv import HostCopies
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.kv.kv_layout import KVLayout, KVSlice
from tests.engine.engine_runs import prompt, tokens

LAYOUT = KVLayout(3, 2, 8, "float32", 4)


def sequence(name: str, blocks: list[int], num_computed: int) -> Sequence:
    result = Sequence(EngineRequest(name, tuple(range(num_computed)), SamplingParams(max_tokens=1)), 0)
    result.blocks, result.num_computed = blocks, num_computed
    return result


def test_copies_take_no_more_than_their_room_and_come_back_bit_by_bit() -> None:
    arena = KVArena(LAYOUT, 8, "cpu")
    arena.tensor.uniform_(-9, 9)
    copies = HostCopies(arena, LAYOUT, 3 * LAYOUT.block_bytes)
    one, other, late = sequence("a", [5, 2], 7), sequence("b", [3], 4), sequence("c", [1], 2)
    before = bytes(arena.read([5, 2], KVSlice(0, 3, 0, 7)))
    assert copies.save(one)
    assert copies.save(other)
    assert 2 * LAYOUT.block_bytes < copies.num_bytes <= 3 * LAYOUT.block_bytes
    assert not copies.save(late)
    copies.forget(other)
    assert copies.save(late)
    arena.tensor.zero_()
    one.blocks = [7, 0]
    copies.load(one)
    assert bytes(arena.read([7, 0], KVSlice(0, 3, 0, 7))) == before
    assert torch.count_nonzero(arena.tensor) == 3 * 2 * 2 * 7 * 8
    copies.forget(late)
    assert copies.num_bytes == 0


@pytest.mark.parametrize("num_blocks", [0, 1, 2, None])
def test_an_answer_without_room_on_the_host_goes_on_with_the_same_text(
    tiny_checkpoint: Callable[[str], Checkpoint], num_blocks: int | None
) -> None:
    checkpoint = tiny_checkpoint("llama")

    def engine(**options: Any) -> Engine:
        return Engine(checkpoint, EngineConfig(dtype="float32", block_tokens=8, prefix_cache=False, **options))

    def request(name: str, level: int, length: int, max_tokens: int, most_s: float) -> EngineRequest:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return EngineRequest(
            name, prompt(length, length), sampling, priority=level, class_priority=level, max_pause_s=most_s
        )

    low, high = request("low", 1, 20, 12, 1e9), request("high", 0, 25, 6, 0.0)
    alone = engine(num_blocks=16)
    alone.add(low)
    expected = [output.token_id for _ in range(12) for output in alone.step().outputs]
    alone.close()
    block_bytes = alone.layout.block_bytes
    bounded = engine(num_blocks=5, paused_bytes=None if num_blocks is None else num_blocks * block_bytes)
    bounded.add(low)
    results = [bounded.step() for _ in range(3)]
    bounded.add(high)
    while bounded.has_work():
        results.append(bounded.step())
        bounded.check_integrity()
    has_room = num_blocks is None
    assert sum(result.num_paused for result in results) == 1
    assert (sum(result.num_moved_out for result in results) == 1) is has_room
    assert tokens((output for result in results for output in result.outputs), "low") == expected
    assert len(tokens((output for result in results for output in result.outputs), "high")) == 6
    bounded.close()
