"""The `flex` attention back end: torch's FlexAttention over pages, FlexDecoding for single rows..

Keys are read where they lie: a block mask names the blocks of each tile of rows, in the arena's numbering, and a mask
function turns a slot back into a position (Dong et al., "Flex Attention", 2024, section 4.2). Windows and capped scores
are part of the functions. Compiled where torch can compile (`can_compile`); elsewhere torch computes all scores of the
blocks that the step reads, so those are copied together first. Latents, and quantised KV, are left to the reference.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from halfmoon.engine.attention.attention import AttentionBatch, SdpaBackend, attend_reference, store
from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.kv_memory.quantised_rows import is_quantised

_TILE_ROWS = 64  # of a prompt's chunk
_NOWHERE = 1 << 30  # where a tile has blocks that are not its own
_ALL = 1 << 30  # a window that holds everything
_MOST_PROGRAMS = 32  # beyond which torch would compute all scores; four serve, and some for sizes that it sees first

Flex = Callable[..., Any]


_CPU_BLOCK_TOKENS = 16  # blocks are multiples: what torch 2.13 compiles for AVX2 sums others wrongly, as 8 and 24


def can_compile(device: str, block_tokens: int) -> bool:
    """Whether torch compiles: for CUDA with Triton, for a CPU with a C++ compiler and AVX2 if it sums blocks right."""
    if device.startswith("cuda"):
        return True
    has_vectors = torch.cpu.get_capabilities().get("avx2", False)
    return bool(has_vectors) and block_tokens % _CPU_BLOCK_TOKENS == 0 and shutil.which("g++") is not None


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of equally many rows, each of one sequence."""

    rows: Tensor  # [num_tiles, tile_rows] int64, which rows of the step; padding repeats the first
    kept: Tensor  # [num tokens of these tiles] int64, where the flattened tiles have the step's rows, in order
    starts: Tensor  # [num_tiles] int32, position of the first row
    num_blocks: Tensor  # [num_tiles, 1, 1] int32, that the rows read
    blocks: Tensor  # [num_tiles, 1, 1, width] int32
    positions: Tensor  # [num_tiles, width] int32, of the first slot of each block; _NOWHERE if it is not read

    def mask(self, block_tokens: int, width: int, window: Tensor) -> BlockMask:
        """What each row sees of `width` blocks: the latest `window` tokens up to itself."""
        further = (0, width - self.positions.shape[1])
        starts, positions = self.starts, functional.pad(self.positions, further, value=_NOWHERE)
        blocks = functional.pad(self.blocks, further)
        size = torch.tensor(block_tokens, dtype=torch.int32, device=starts.device)  # a number would not compile (torch)

        def sees(tile: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            del head
            at, key = starts[tile] + row, positions[tile, slot // size] + slot % size
            return (key <= at) & (at - key < window)

        return BlockMask.from_kv_blocks(
            self.num_blocks,
            blocks,
            torch.zeros_like(self.num_blocks),  # blocks without a mask: none, but compilers want them
            torch.zeros_like(blocks),
            BLOCK_SIZE=(128, block_tokens),
            mask_mod=sees,
            seq_lengths=(self.rows.shape[1], width * block_tokens),
            compute_q_blocks=False,
        )


@dataclass(frozen=True, slots=True)
class FlexStep:
    """A step's tiles: single rows first, then those of chunks."""

    plain: AttentionBatch  # where rows are stored, and what the reference attends to
    tails: Tensor  # [num_slots] int64: behind the last token of each sequence, in its last block
    used: Tensor | None  # [num_used] int64, the blocks that tiles number from 0; None: they name the arena's
    block_tokens: int
    tiles: tuple[Tiles, ...]
    flex: Flex

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`."""
        if is_quantised(layer_kv.dtype) or rule.latent_size is not None:
            return attend_reference(q, k, v, layer_kv, self.plain, rule)
        store(k, v, layer_kv, self.plain.slots)
        layer_kv[1].index_fill_(1, self.tails, 0)  # weights of 0 are multiplied with them: they must be numbers
        keys, values = layer_kv
        if self.used is not None:
            keys, values = (one.unflatten(1, (-1, self.block_tokens))[:, self.used].flatten(1, 2) for one in layer_kv)
        cap = None if rule.softcap is None else partial(_capped, torch.tensor(rule.softcap, device=q.device))
        window = torch.tensor(rule.window or _ALL, dtype=torch.int32, device=q.device)
        outs = []
        for tiles in self.tiles:
            out = self.flex(
                q[tiles.rows].transpose(1, 2),  # [num_tiles, num_heads, tile_rows, head_dim]
                keys[None],
                values[None],
                score_mod=cap,
                block_mask=tiles.mask(self.block_tokens, keys.shape[1] // self.block_tokens, window),
                scale=rule.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outs.append(out.transpose(1, 2).flatten(0, 1)[tiles.kept].flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _capped(cap: Tensor, score: Tensor, *where: Tensor) -> Tensor:
    del where
    return torch.tanh(score / cap) * cap


class FlexBackend:
    """Prepares steps. Owns the compiled function, which is compiled again for few sizes of steps."""

    def __init__(self, block_tokens: int, device: str, compiles: bool) -> None:
        self._block_tokens = block_tokens
        self._device = device
        self._plain = SdpaBackend(block_tokens, device)
        self._compiles = compiles
        compiler: Any = torch.compile  # its stubs lack the limit
        self._flex: Flex = (
            compiler(flex_attention, dynamic=True, recompile_limit=_MOST_PROGRAMS) if compiles else flex_attention
        )

    def step(self, spans: Sequence[TokenSpan]) -> FlexStep:
        """Cuts chunks into tiles; names the blocks of the arena, or numbers those that the step reads."""
        size = self._block_tokens
        used = None
        read = sorted({block for blocks, _, end in spans for block in blocks[: -(-end // size)]})
        numbers: dict[int, int] = {block: block for block in read}
        width = read[-1] + 1
        if not self._compiles:
            numbers, width = {block: number for number, block in enumerate(read)}, len(read)
            used = torch.tensor(read, device=self._device)
        single: list[tuple[int, TokenSpan]] = []
        chunks: list[tuple[int, TokenSpan]] = []
        row = 0
        for span in spans:
            (single if span.end - span.start == 1 and not chunks else chunks).append((row, span))
            row += span.end - span.start
        tails = [
            blocks[(end - 1) // size] * size + offset
            for blocks, _, end in spans
            for offset in range((end - 1) % size + 1, size)
        ]
        tiles = [self._tiles(part, rows, numbers, width) for part, rows in ((single, 1), (chunks, _TILE_ROWS)) if part]
        return FlexStep(
            self._plain.step(spans),
            torch.tensor(tails, dtype=torch.int64, device=self._device),
            used,
            size,
            tuple(tiles),
            self._flex,
        )

    def _tiles(self, spans: list[tuple[int, TokenSpan]], tile_rows: int, numbers: dict[int, int], width: int) -> Tiles:
        size = self._block_tokens
        cut = [
            (row + first - span.start, first, min(first + tile_rows, span.end), span.blocks)
            for row, span in spans
            for first in range(span.start, span.end, tile_rows)
        ]
        num_tiles = max(2, len(cut))  # a size of 1 would be compiled apart
        rows = torch.zeros(num_tiles, tile_rows, dtype=torch.int64)
        starts = torch.zeros(num_tiles, dtype=torch.int32)
        num_blocks = torch.zeros(num_tiles, 1, 1, dtype=torch.int32)
        blocks = torch.zeros(num_tiles, 1, 1, width, dtype=torch.int32)
        positions = torch.full((num_tiles, width), _NOWHERE, dtype=torch.int32)
        kept = []
        for tile, (row, first, end, of_span) in enumerate(cut):
            rows[tile] = row
            rows[tile, : end - first] = torch.arange(row, row + end - first)
            kept.append(torch.arange(end - first) + tile * tile_rows)
            mine = torch.tensor([numbers[block] for block in of_span[: -(-end // size)]])
            starts[tile], num_blocks[tile] = first, len(mine)
            blocks[tile, 0, 0, : len(mine)] = mine
            positions[tile, mine] = torch.arange(len(mine), dtype=torch.int32) * size
        to = partial(torch.Tensor.to, device=self._device)
        return Tiles(to(rows), to(torch.cat(kept)), to(starts), to(num_blocks), to(blocks), to(positions))
