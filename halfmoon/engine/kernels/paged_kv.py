"""One layer's K and V in the arena, as the attention and store kernels read them.

A slot is one token's index in a head: `block_id * block_tokens + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from halfmoon.engine.kernels.tensor_check import FLOATS, check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import padded
from halfmoon.engine.kv_memory.quantised_rows import CODES, is_quantised, split_memory

_STAGES = 3
_MAX_HEAD_DIM = 256  # the tiles of attention over K and V are sized for this
# The device that is compiled for where there is none, an H100:
_SHARED_BYTES = 227 << 10  # of a program
_GENERATION = 9
_NUM_SMS = 132


@dataclass(frozen=True, slots=True)
class PagedKV:
    """K and V of one layer: numbers or, with scales, codes and their scales (`quantised_rows.py`).

    Raises ValueError or TypeError for tensors that do not fit together.
    """

    k: Tensor  # [num_kv_heads, num_slots, head_dim], slots dense
    v: Tensor  # like k
    block_tokens: int
    k_scales: Tensor | None = None  # [num_kv_heads, num_slots] int16, the bits of bfloat16
    v_scales: Tensor | None = None  # like k_scales

    @classmethod
    def of_layer(cls, layer_kv: Tensor, block_tokens: int) -> PagedKV:
        """The K and V of an arena's layer: [2, num_kv_heads, num_slots, row_items]."""
        if not is_quantised(layer_kv.dtype):
            return cls(layer_kv[0], layer_kv[1], block_tokens)
        codes, scales = split_memory(layer_kv)
        scales = scales.view(torch.int16)
        return cls(codes[0], codes[1], block_tokens, scales[0], scales[1])

    def __post_init__(self) -> None:
        check_tensor("k", self.k, (None, None, None), FLOATS if self.k_scales is None else tuple(CODES))
        check_tensor("v", self.v, self.k.shape, (self.k.dtype,))
        _, num_slots, head_dim = self.k.shape
        if self.k_scales is not None and self.v_scales is not None:
            for scales in (self.k_scales, self.v_scales):
                is_apart = len(scales) > 1 and scales.stride(0) * 2 != self.k.stride(0)
                if scales.shape != self.k.shape[:2] or scales.stride(1) != 1 or is_apart:
                    raise ValueError("scales: those of a head must be dense, and heads as far apart as their codes")
        if self.k.stride() != self.v.stride() or self.k.stride(1) != head_dim:
            raise ValueError(
                f"k, v: slots must be dense and strides equal, not {self.k.stride()} and {self.v.stride()}"
            )
        if self.block_tokens < 1 or num_slots % self.block_tokens:
            raise ValueError(f"k: {num_slots} slots are not whole blocks of {self.block_tokens}")
        check_same_device(k=self.k, v=self.v)

    def check_query(self, q: Tensor) -> int:
        """q: [rows, num_q_heads, head_dim]. Returns the query heads per KV head. Raises ValueError or TypeError."""
        check_tensor("q", q, (None, None, self.k.shape[2]), self.new_dtypes)
        if q.shape[2] > _MAX_HEAD_DIM:
            raise ValueError(f"q: head size {q.shape[2]} is over {_MAX_HEAD_DIM}")
        group, rest = divmod(q.shape[1], self.k.shape[0])
        if group == 0 or rest:
            raise ValueError(f"q: {q.shape[1]} query heads cannot share {self.k.shape[0]} KV heads evenly")
        return group

    @property
    def new_dtypes(self) -> tuple[torch.dtype, ...]:
        """What queries and new rows may be: anything that is rounded, else the dtype in memory."""
        return (self.k.dtype,) if self.k_scales is None else FLOATS

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """The scales of K and V; without any, the numbers, whose place no kernel then reads."""
        if self.k_scales is None or self.v_scales is None:
            return self.k, self.v
        return self.k_scales, self.v_scales

    def tile_bytes(self, tile: int) -> int:
        """Shared memory for the K and V of `tile` tokens of a head."""
        dim_pad = padded(self.k.shape[2])
        return 2 * tile * dim_pad * self.k.element_size()

    def gathered(self, block_row: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Gathers K and V of a sequence's first tokens for references: [num_kv_heads, num_tokens, head_dim] float32."""
        positions = torch.arange(num_tokens, device=block_row.device)
        slots = block_row.long()[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
        k, v = self.k[:, slots], self.v[:, slots]
        if self.k_scales is None or self.v_scales is None:
            return k.float(), v.float()
        k, v = (one.view(CODES[one.dtype]).float() for one in (k, v))
        k_scales, v_scales = (one[:, slots].view(torch.bfloat16).float() for one in (self.k_scales, self.v_scales))
        return k * k_scales.unsqueeze(-1), v * v_scales.unsqueeze(-1)


def num_stages(device: torch.device, stage_bytes: int, other_bytes: int, programs: int = 1) -> int:
    """The depth of the load pipeline: three tiles, or what shared memory holds next to `other_bytes`.

    `programs` share the memory of a multiprocessor.
    """
    return max(1, min(_STAGES, (_shared_bytes(device) // programs - other_bytes) // stage_bytes))


def _shared_bytes(device: torch.device) -> int:
    return int(_properties(device).shared_memory_per_block_optin) if device.type == "cuda" else _SHARED_BYTES


def generation(device: torch.device) -> int:
    """The first number of a GPU's compute capability: 8 is Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return int(_properties(device).major) if device.type == "cuda" else _GENERATION


def num_sms(device: torch.device) -> int:
    """The multiprocessors of a GPU."""
    return int(_properties(device).multi_processor_count) if device.type == "cuda" else _NUM_SMS


@cache
def _properties(device: torch.device) -> Any:  # torch's stubs lack a field
    """Asked for at every launch, and never another."""
    return torch.cuda.get_device_properties(device)


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


@triton.jit
def tile_numbers(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Returns K or V as loaded, or the values of codes, in `dtype`: exact in each that queries may have.

    Codes of e4m3 become float16 first: from 8.9 on there is an instruction for it. Others shift: read as float16, seven
    bits further up, codes are 1/256 of their value.
    """
    if codes.dtype == tl.uint8:
        if cuda_capability_geq(8, 9):
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
        bits = codes.to(tl.int16)
        halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (halves.to(tl.float32) * 256.0).to(dtype)
    return codes.to(dtype)


@triton.jit
def tile_scales(
    scales: tl.tensor,  # one head's [num_slots] int16
    slots: tl.tensor,  # [TILE] int64
    seen: tl.tensor,  # [TILE], others are 0
) -> tl.tensor:
    """Returns the scales of the rows in `slots`, float32 [TILE]."""
    bits = tl.load(scales + slots, mask=seen, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)
