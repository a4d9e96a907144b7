"""Copies blocks between the arena and a contiguous transfer buffer in the canonical order of `halfmoon.kv.kv_layout`.

One launch moves every layer and head of a transfer. Rows are moved as integers, so that no dtype is interpreted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.tensor_check import check_contiguous, check_same_device, check_shape, check_tensor
from halfmoon.engine.kernels.tile_counts import num_tiles, padded
from halfmoon.engine.kv_memory.quantised_rows import is_quantised, put_rows, rows_at

_TILE_TOKENS = 32


@triton.jit(do_not_specialize=["start", "num_tokens"])
def _copy_blocks_kernel(
    arena: tl.tensor,  # [num_planes, num_slots, ROW_WORDS]; of codes: see `split_memory`
    buffer: tl.tensor,  # [num_planes, num_tokens, ROW_WORDS]
    block_ids: tl.tensor,  # [num_blocks]
    start: tl.tensor,  # position in the sequence of the buffer's first token
    num_tokens: tl.tensor,
    num_slots: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    NUMBER_WORDS: tl.constexpr,  # of a row without its scale, which is a word
    WORDS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    DIRECTION: tl.constexpr,
) -> None:
    plane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    word = tl.arange(0, WORDS_PAD)
    in_range = row < num_tokens
    position = start + row
    block = tl.load(block_ids + position // BLOCK_TOKENS, mask=in_range, other=0).to(tl.int64)
    slot = block * BLOCK_TOKENS + position % BLOCK_TOKENS
    mask = in_range[:, None] & (word < NUMBER_WORDS)[None, :]
    rows = buffer + (plane * num_tokens + row) * ROW_WORDS
    numbers = arena + plane * num_slots * ROW_WORDS + slot * NUMBER_WORDS
    _copy(numbers[:, None] + word[None, :], rows[:, None] + word[None, :], mask, DIRECTION)
    if NUMBER_WORDS < ROW_WORDS:
        scales = arena + (plane * ROW_WORDS + NUMBER_WORDS) * num_slots + slot
        _copy(scales, rows + NUMBER_WORDS, in_range, DIRECTION)


@triton.jit
def _copy(in_arena: tl.tensor, in_buffer: tl.tensor, mask: tl.tensor, DIRECTION: tl.constexpr) -> None:
    if DIRECTION == "gather":
        tl.store(in_buffer, tl.load(in_arena, mask=mask), mask=mask)
    else:
        tl.store(in_arena, tl.load(in_buffer, mask=mask), mask=mask)


def gather_blocks(
    arena: Tensor,
    block_ids: Tensor,
    block_tokens: int,
    layer_start: int,
    layer_end: int,
    start: int,
    num_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """Copies tokens `start`..`start + num_tokens` of the sequence in `block_ids` out of the arena.

    arena: [num_layers, 2, num_kv_heads, num_slots, row_items]; block_ids: [num_blocks] int32 or int64. Returns
    [layer_end - layer_start, 2, num_kv_heads, num_tokens, head_dim], which is `out`, if given. Raises ValueError or
    TypeError.
    """
    _check(arena, block_ids, block_tokens, layer_start, layer_end, start, num_tokens)
    layers = arena[layer_start:layer_end]
    shape = (*layers.shape[:3], num_tokens, layers.shape[4])
    buffer = torch.empty(shape, dtype=arena.dtype, device=arena.device) if out is None else out
    if out is not None:
        check_shape("out", out, shape)
        _check_buffer("out", out, arena)
    _launch(layers, buffer, block_ids, block_tokens, start, "gather")
    return buffer


def scatter_blocks(
    buffer: Tensor, arena: Tensor, block_ids: Tensor, block_tokens: int, layer_start: int, start: int
) -> None:
    """Copies buffer [layers, 2, num_kv_heads, num_tokens, head_dim] into the arena's layers from `layer_start`.

    Raises ValueError or TypeError.
    """
    check_shape("buffer", buffer, (None, 2, None, None, None))
    layer_end = layer_start + buffer.shape[0]
    _check(arena, block_ids, block_tokens, layer_start, layer_end, start, buffer.shape[3])
    check_shape("buffer", buffer, (None, 2, arena.shape[2], None, arena.shape[4]))
    _check_buffer("buffer", buffer, arena)
    _launch(arena[layer_start:layer_end], buffer, block_ids, block_tokens, start, "scatter")


def _check(
    arena: Tensor, block_ids: Tensor, block_tokens: int, layer_start: int, layer_end: int, start: int, num_tokens: int
) -> None:
    check_shape("arena", arena, (None, 2, None, None, None))
    check_contiguous("arena", arena)
    check_tensor("block_ids", block_ids, (None,), (torch.int32, torch.int64))
    check_same_device(arena=arena, block_ids=block_ids)
    if not 0 <= layer_start < layer_end <= arena.shape[0]:
        raise ValueError(f"layers {layer_start}..{layer_end} are outside 0..{arena.shape[0]}")
    if start < 0 or num_tokens < 1 or start + num_tokens > block_ids.numel() * block_tokens:
        raise ValueError(f"tokens {start}..{start + num_tokens} are outside {block_ids.numel()} blocks")


def _check_buffer(name: str, buffer: Tensor, arena: Tensor) -> None:
    if buffer.dtype != arena.dtype:
        raise TypeError(f"{name}: dtype {buffer.dtype} where the arena has {arena.dtype}")
    check_contiguous(name, buffer)
    check_same_device(arena=arena, **{name: buffer})


def _launch(layers: Tensor, buffer: Tensor, block_ids: Tensor, block_tokens: int, start: int, direction: str) -> None:
    integers = _integers(layers)
    num_tokens, row_words = buffer.shape[3], buffer.shape[4] * buffer.element_size() // integers.itemsize
    number_words = row_words - 1 if is_quantised(layers.dtype) else row_words  # without the scale
    num_planes = layers.shape[0] * 2 * layers.shape[2]
    _copy_blocks_kernel[(num_tiles(num_tokens, _TILE_TOKENS), num_planes)](
        layers.view(integers), buffer.view(integers), block_ids, start, num_tokens, layers.shape[3],
        BLOCK_TOKENS=block_tokens, ROW_WORDS=row_words, NUMBER_WORDS=number_words, WORDS_PAD=padded(number_words),
        TILE=_TILE_TOKENS, DIRECTION=direction, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _integers(layers: Tensor) -> torch.dtype:
    """The words of rows: of 4 bytes if these divide a row of numbers and fit the memory's alignment, else of 2."""
    row_bytes, offset = (items * layers.element_size() for items in (layers.shape[4], layers.storage_offset()))
    return torch.int16 if is_quantised(layers.dtype) or row_bytes % 4 or offset % 4 else torch.int32


def gather_blocks_reference(
    arena: Tensor, block_ids: Tensor, block_tokens: int, layer_start: int, layer_end: int, start: int, num_tokens: int
) -> Tensor:
    """`gather_blocks` in plain torch."""
    return rows_at(arena[layer_start:layer_end], _slots(block_ids, block_tokens, start, num_tokens))


def scatter_blocks_reference(
    buffer: Tensor, arena: Tensor, block_ids: Tensor, block_tokens: int, layer_start: int, start: int
) -> None:
    """`scatter_blocks` in plain torch."""
    slots = _slots(block_ids, block_tokens, start, buffer.shape[3])
    put_rows(arena[layer_start : layer_start + buffer.shape[0]], slots, buffer)


def _slots(block_ids: Tensor, block_tokens: int, start: int, num_tokens: int) -> Tensor:
    positions = torch.arange(start, start + num_tokens, device=block_ids.device)
    return block_ids.long()[positions // block_tokens] * block_tokens + positions % block_tokens
