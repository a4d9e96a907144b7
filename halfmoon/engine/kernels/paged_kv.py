"""One layer's K and V in the arena, as the attention and store kernels read them.

A slot is one token's index in a head: `block_id * block_tokens + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.tensor_check import FLOATS, check_same_device, check_tensor

_STAGES = 3
_MAX_HEAD_DIM = 256  # the attention kernels' tiles are sized for this


@dataclass(frozen=True, slots=True)
class PagedKV:
    """K and V of one layer.

    Raises ValueError or TypeError for tensors that do not fit together.
    """

    k: Tensor  # [num_kv_heads, num_slots, head_dim], slots dense
    v: Tensor  # like k
    block_tokens: int

    def __post_init__(self) -> None:
        check_tensor("k", self.k, (None, None, None), FLOATS)
        check_tensor("v", self.v, self.k.shape, (self.k.dtype,))
        _, num_slots, head_dim = self.k.shape
        if self.k.stride() != self.v.stride() or self.k.stride(1) != head_dim:
            raise ValueError(
                f"k, v: slots must be dense and strides equal, not {self.k.stride()} and {self.v.stride()}"
            )
        if head_dim > _MAX_HEAD_DIM:
            raise ValueError(f"k: head size {head_dim} is over {_MAX_HEAD_DIM}")
        if self.block_tokens < 1 or num_slots % self.block_tokens:
            raise ValueError(f"k: {num_slots} slots are not whole blocks of {self.block_tokens}")
        check_same_device(k=self.k, v=self.v)

    def check_query(self, q: Tensor) -> int:
        """q: [rows, num_q_heads, head_dim]. Returns the query heads per KV head. Raises ValueError or TypeError."""
        check_tensor("q", q, (None, None, self.k.shape[2]), (self.k.dtype,))
        group, rest = divmod(q.shape[1], self.k.shape[0])
        if group == 0 or rest:
            raise ValueError(f"q: {q.shape[1]} query heads cannot share {self.k.shape[0]} KV heads evenly")
        return group

    def num_stages(self, tile: int, other_bytes: int) -> int:
        """Returns the depth of the load pipeline: three tiles, or what shared memory holds next to `other_bytes`."""
        if self.k.device.type != "cuda":
            return _STAGES
        device: Any = torch.cuda.get_device_properties(self.k.device)  # torch's stubs lack the field
        limit = int(device.shared_memory_per_block_optin)
        dim_pad: int = triton.next_power_of_2(self.k.shape[2])
        stage_bytes = 2 * tile * dim_pad * self.k.element_size()
        return max(1, min(_STAGES, (limit - other_bytes) // stage_bytes))

    def gathered(self, block_row: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Gathers K and V of a sequence's first tokens for references: [num_kv_heads, num_tokens, head_dim] float32."""
        positions = torch.arange(num_tokens, device=block_row.device)
        slots = block_row.long()[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
        return self.k[:, slots].float(), self.v[:, slots].float()


@triton.jit
def tile_slots(
    block_row: tl.tensor,  # one sequence's row of the block table
    start: tl.tensor,  # first position, a multiple of TILE
    end: tl.tensor,  # positions from here on are masked
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> tl.tensor:
    """Returns the slots of positions `start`..`start + TILE`, int64 [TILE]."""
    offset = tl.arange(0, TILE)
    if BLOCK_TOKENS % TILE == 0:  # the tile lies inside one block: one load, and consecutive slots
        block = tl.load(block_row + start // BLOCK_TOKENS, mask=start < end, other=0).to(tl.int64)
        slots = block * BLOCK_TOKENS + start % BLOCK_TOKENS + offset
    else:
        position = start + offset
        blocks = tl.load(block_row + position // BLOCK_TOKENS, mask=position < end, other=0).to(tl.int64)
        slots = blocks * BLOCK_TOKENS + position % BLOCK_TOKENS
    return slots
