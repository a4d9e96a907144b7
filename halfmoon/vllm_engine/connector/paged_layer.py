"""One layer of a paged KV cache in canonical order, whatever order the engine's attention keeps it in. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfmoon.errors import Incompatible

WriteTokens = Callable[[Tensor, Tensor, Tensor], None]
"""`(keys, values, slots)`: the engine's own write; keys and values [tokens, heads, head_dim], slots [tokens]."""

_PROBED_BLOCK = 0


class PagedLayer:
    """Reads and writes tokens of one layer of an engine's cache. Owns where each value of a block lies."""

    def __init__(self, cache: Tensor, shape: tuple[int, int, int, int], places: Tensor) -> None:
        """cache: [blocks, ...]. shape: (2, heads, block_tokens, head_dim). places: of that shape, in each block."""
        self._block_tokens = shape[2]
        self._cells = _cells(cache)
        self._places = places.to(cache.device)
        self._views = _strided(cache, places)

    @classmethod
    def probed(cls, cache: Tensor, heads: int, block_tokens: int, head_dim: int, write: WriteTokens) -> PagedLayer:
        """Finds out where values lie by writing known bits into block 0, which no request uses yet.

        Raises Incompatible if the cache does not keep each value once and unchanged.
        """
        places = probe_places(cache, heads, block_tokens, head_dim, write)
        return cls(cache, (2, heads, block_tokens, head_dim), places)

    def read(self, blocks: Sequence[int], start: int, num_tokens: int) -> Tensor:
        """[2, heads, num_tokens, head_dim]: a copy of tokens `start`.. of a sequence that lies in `blocks`."""
        if self._views is not None:
            return self._read_blocks(self._views, blocks, start, num_tokens)
        block, token = self._where(blocks, start, num_tokens)
        return self._cells[block[:, None], self._places[:, :, token]]

    def write(self, blocks: Sequence[int], start: int, values: Tensor) -> None:
        """Writes `values`, [2, heads, num_tokens, head_dim], as tokens `start`.. of a sequence."""
        block, token = self._where(blocks, start, values.shape[2])
        values = values.to(self._cells.device)
        if self._views is not None:
            for view, part in zip(self._views, values, strict=True):
                view[block, :, token] = part.transpose(0, 1)
        else:
            self._cells[block[:, None], self._places[:, :, token]] = values

    def _read_blocks(self, views: tuple[Tensor, Tensor], blocks: Sequence[int], start: int, num_tokens: int) -> Tensor:
        """Copies whole blocks, which is several times faster than token by token, and cuts the ends off."""
        first, last = start // self._block_tokens, -(-(start + num_tokens) // self._block_tokens)
        block_ids = torch.tensor(blocks[first:last]).to(self._cells.device)
        _, heads, block_tokens, head_dim = views[0].shape
        values = views[0].new_empty(2, heads, last - first, block_tokens, head_dim)
        for view, part in zip(views, values, strict=True):
            part.transpose(0, 1).copy_(view[block_ids])
        before = start - first * block_tokens
        return values.flatten(2, 3)[:, :, before : before + num_tokens]

    def _where(self, blocks: Sequence[int], start: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """[num_tokens] each: the tokens' blocks and their places in them."""
        tokens = torch.arange(start, start + num_tokens)
        block_ids = torch.tensor(blocks)[tokens // self._block_tokens]
        device = self._cells.device
        return block_ids.to(device), (tokens % self._block_tokens).to(device)


def probe_places(cache: Tensor, heads: int, block_tokens: int, head_dim: int, write: WriteTokens) -> Tensor:
    """[2, heads, block_tokens, head_dim]: the cell of block 0 in which each value lies. Zeroes the block.

    Each cell learns the number of its value bit by bit: zeros and ones survive in every dtype.
    """
    shape = (2, heads, block_tokens, head_dim)
    numbers = torch.arange(2 * heads * block_tokens * head_dim).reshape(shape)
    cells = _cells(cache)[_PROBED_BLOCK]
    slots = torch.arange(_PROBED_BLOCK * block_tokens, (_PROBED_BLOCK + 1) * block_tokens, device=cache.device)
    found = torch.zeros(cells.numel(), dtype=torch.int64)
    for bit in range(numbers.numel().bit_length()):
        bits = ((numbers >> bit) & 1).to(device=cache.device, dtype=cache.dtype)
        keys, values = bits.transpose(1, 2).contiguous()  # [tokens, heads, head_dim]
        write(keys, values, slots)
        seen = cells.to("cpu", torch.float32)
        if not bool(((seen == 0) | (seen == 1)).all()):
            raise Incompatible("vLLM's KV cache does not keep values as they are: leave kv-cache-dtype at auto")
        found |= seen.to(torch.int64) << bit
    cells.zero_()
    if found.numel() != numbers.numel() or not torch.equal(found.sort().values, numbers.reshape(-1)):
        raise Incompatible("vLLM's KV cache does not keep each key and value once: its layout is not supported")
    places = torch.empty_like(found)
    places[found] = torch.arange(found.numel())
    return places.reshape(shape)


def _cells(cache: Tensor) -> Tensor:
    """[blocks, cells] in the order of memory; a view. Raises Incompatible if other data lies between a block's."""
    per_block = cache[0].numel()
    spans = sum((size - 1) * stride for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    if spans + 1 != per_block:
        raise Incompatible(
            f"vLLM's KV cache of shape {tuple(cache.shape)} has strides {cache.stride()}, so a block is not in one "
            "piece: set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return torch.as_strided(cache, (cache.shape[0], per_block), (cache.stride(0), 1), cache.storage_offset())


def _strided(cache: Tensor, places: Tensor) -> tuple[Tensor, Tensor] | None:
    """Keys and values as views, [blocks, heads, tokens, head_dim]; None where no strides describe them.

    Copying through strides is several times faster than through one index a value.
    """
    cells_of_block = cache.stride(0)
    views = []
    for part in places:  # [heads, tokens, head_dim]
        first = part[0, 0, 0]
        steps = [int(part.select(axis, 1)[0, 0] - first) if part.shape[axis] > 1 else 0 for axis in range(3)]
        grids = torch.meshgrid(*(torch.arange(size) for size in part.shape), indexing="ij")
        if not torch.equal(part, first + sum(grid * step for grid, step in zip(grids, steps, strict=True))):
            return None
        offset = cache.storage_offset() + int(first)
        views.append(torch.as_strided(cache, (cache.shape[0], *part.shape), (cells_of_block, *steps), offset))
    return views[0], views[1]
