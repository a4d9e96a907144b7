"""Canonical bytes go in and come out unchanged, wherever the blocks lie, and touch nothing else."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.kv_memory.kv_arena import KVArena, slot_runs
from halfmoon.engine.kv_memory.quantised_rows import put_rows, rows_at, split_memory
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVDtype, KVLayout, KVSlice

NUM_BLOCKS = 12
BLOCK_TOKENS = 4


@given(
    blocks=st.permutations(range(NUM_BLOCKS)),
    ends=st.tuples(st.integers(0, 48), st.integers(0, 48)).map(sorted),
)
def test_runs_cover_the_tokens_in_order_and_are_as_long_as_can_be(blocks: list[int], ends: list[int]) -> None:
    start, end = ends
    runs = list(slot_runs(blocks, BLOCK_TOKENS, start, end))
    slots = [slot for run in runs for slot in range(*run)]
    assert slots == [blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS for i in range(start, end)]
    assert all(one[1] != two[0] for one, two in pairwise(runs))


@pytest.mark.parametrize("dtype", get_args(KVDtype))
@settings(max_examples=30)
@given(
    blocks=st.permutations(range(NUM_BLOCKS)).map(lambda ids: ids[:6]),
    layers=st.tuples(st.integers(0, 2), st.integers(1, 3)),
    tokens=st.tuples(st.integers(0, 12), st.integers(1, 12)),
)
def test_bytes_come_out_as_they_went_in(
    dtype: KVDtype, blocks: list[int], layers: tuple[int, int], tokens: tuple[int, int]
) -> None:
    layout = KVLayout(3, 2, 8, dtype, BLOCK_TOKENS)
    arena = KVArena(layout, NUM_BLOCKS, "cpu")
    arena.tensor.zero_()
    layer_start, layer_end = layers[0], min(layers[0] + layers[1], 3)
    start, num_tokens = tokens
    shape = layout.memory_shape(layer_end - layer_start, num_tokens)
    values = torch.empty(shape).uniform_(-99, 99).to(arena.tensor.dtype)
    payload = values.view(torch.uint8).numpy().tobytes()
    part = KVSlice(layer_start, layer_end, start, num_tokens)
    arena.write(blocks, part, payload)
    assert bytes(arena.read(blocks, part)) == payload
    slots = [slot for run in slot_runs(blocks, BLOCK_TOKENS, start, start + num_tokens) for slot in range(*run)]
    written, at = arena.tensor[layer_start:layer_end], torch.tensor(slots)
    assert torch.equal(rows_at(written, at), values)
    put_rows(written, at, torch.zeros_like(values))
    assert not arena.tensor.any()


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 8, 12, 64])
def test_heads_of_codes_begin_where_gpus_load_16_bytes(block_tokens: int) -> None:
    arena = KVArena(KVLayout(2, 3, 64, "int8", block_tokens), 5, "cpu")
    assert arena.num_blocks == 5
    assert arena.tensor.shape[3] % block_tokens == 0
    assert 5 * block_tokens <= arena.tensor.shape[3] < (5 + 8) * block_tokens
    for part in split_memory(arena.tensor):
        assert part.stride(2) * part.element_size() % 16 == 0
        assert part.data_ptr() % 16 == arena.tensor.data_ptr() % 16 == 0


def test_codes_need_an_even_head_size() -> None:
    with pytest.raises(Incompatible, match="even head size, not 5"):
        KVArena(KVLayout(1, 1, 5, "fp8", 8), 4, "cpu")
    assert KVArena(KVLayout(1, 1, 5, "float16", 8), 4, "cpu").tensor.shape == (1, 2, 1, 32, 5)


def test_two_threads_write_two_sequences() -> None:
    layout = KVLayout(3, 2, 8, "bfloat16", BLOCK_TOKENS)
    arena = KVArena(layout, NUM_BLOCKS, "cpu")
    sequences = {1: [0, 2, 4], 2: [1, 3, 5]}

    def write(fill: int) -> None:
        payload = bytes([fill]) * (12 * layout.token_bytes)
        for _ in range(50):
            arena.write(sequences[fill], KVSlice(0, 3, 0, 12), payload)

    threads = [threading.Thread(target=write, args=(fill,)) for fill in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fill, blocks in sequences.items():
        assert set(arena.read(blocks, KVSlice(0, 3, 0, 12))) == {fill}


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_memory_on_a_cpu_asks_for_huge_pages() -> None:
    arena = KVArena(KVLayout(2, 3, 64, "bfloat16", 64), 64, "cpu")
    arena.tensor.fill_(1)
    address = arena.tensor.data_ptr()
    flags: list[str] = []
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(bound, 16) for bound in words[0].split("-"))
            is_here = start <= address < end
        elif is_here and words[0] == "VmFlags:":
            flags = words[1:]
    assert "hg" in flags
