"""Where an engine keeps each value is found out, whatever its order, and copies in both directions are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfmoon.errors import Incompatible
from halfmoon.vllm_engine.connector.paged_layer import PagedLayer

HEADS, TOKENS, DIM, BLOCKS = 2, 8, 4, 6
Write = Callable[[Tensor, Tensor, Tensor], None]


def plain(dtype: torch.dtype) -> tuple[Tensor, Write]:
    """[blocks, heads, tokens, 2 * dim], as on GPUs."""
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=dtype)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        cache[slots // TOKENS, :, slots % TOKENS] = torch.cat([keys, values], dim=-1)

    return cache, write


def token_major(dtype: torch.dtype) -> tuple[Tensor, Write]:
    """The same shape, but tokens before heads in memory."""
    cache = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        cache[slots // TOKENS, :, slots % TOKENS] = torch.cat([keys, values], dim=-1)

    return cache, write


def transposed_keys(dtype: torch.dtype) -> tuple[Tensor, Write]:
    """Keys before values, [dim, tokens] each: vLLM's order on CPUs without AMX."""
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=dtype)
    halves = cache.view(BLOCKS, HEADS, 2, TOKENS * DIM)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        block, token = slots // TOKENS, slots % TOKENS
        halves[:, :, 0].view(BLOCKS, HEADS, DIM, TOKENS)[block, :, :, token] = keys
        halves[:, :, 1].view(BLOCKS, HEADS, TOKENS, DIM)[block, :, token] = values

    return cache, write


def scrambled(dtype: torch.dtype) -> tuple[Tensor, Write]:
    """An order that no strides describe, as with AMX tiles."""
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=dtype)
    order = torch.randperm(2 * HEADS * TOKENS * DIM, generator=torch.Generator().manual_seed(1))
    order = order.view(2, HEADS, TOKENS, DIM)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            cache.view(BLOCKS, -1)[slot // TOKENS, order[:, :, slot % TOKENS]] = torch.stack([key, value])

    return cache, write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("made", [plain, token_major, transposed_keys, scrambled])
def test_copies_are_exact_in_any_order(made: Callable[[torch.dtype], tuple[Tensor, Write]], dtype: torch.dtype) -> None:
    cache, write = made(dtype)
    layer = PagedLayer.probed(cache, HEADS, TOKENS, DIM, write)
    assert not cache.any()
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(2, HEADS, 19, DIM, generator=generator).to(dtype)
    blocks = [4, 1, 5]
    slots = torch.tensor([blocks[token // TOKENS] * TOKENS + token % TOKENS for token in range(19)])
    write(values[0].transpose(0, 1), values[1].transpose(0, 1), slots)  # as vLLM computes
    assert torch.equal(layer.read(blocks, 0, 19), values)
    assert torch.equal(layer.read(blocks, 5, 9), values[:, :, 5:14])
    before = cache.clone()
    layer.write([2, 3, 0], 0, values)
    assert torch.equal(layer.read([2, 3, 0], 0, 19), values)
    for block in blocks:
        assert torch.equal(cache[block], before[block])
    again, write_again = made(dtype)  # what is loaded lies where vLLM would have written it
    write_again(values[0].transpose(0, 1), values[1].transpose(0, 1), slots)
    cache.zero_()
    layer.write(blocks, 0, values)
    assert torch.equal(cache, again)


def test_a_cache_that_changes_values_is_refused() -> None:
    cache, write = plain(torch.float32)
    with pytest.raises(Incompatible, match="kv-cache-dtype"):
        PagedLayer.probed(cache, HEADS, TOKENS, DIM, lambda k, v, slots: write(k * 0.5, v, slots))


def test_a_cache_without_all_values_is_refused() -> None:
    cache, write = plain(torch.float32)
    with pytest.raises(Incompatible, match="layout"):
        PagedLayer.probed(cache, HEADS, TOKENS, DIM, lambda k, v, slots: write(k, k, slots))


def test_blocks_in_several_pieces_are_refused() -> None:
    cache = torch.zeros(HEADS, BLOCKS, TOKENS, 2 * DIM).transpose(0, 1)
    with pytest.raises(Incompatible, match="VLLM_KV_CACHE_LAYOUT"):
        PagedLayer.probed(cache, HEADS, TOKENS, DIM, lambda k, v, slots: None)
