"""Rows of codes in torch are, bit for bit, those of the codecs, and e4m3 is torch's own."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from halfmoon.engine.kv_memory.kv_arena import TORCH_DTYPES
from halfmoon.engine.kv_memory.quantised_rows import (
    is_quantised,
    numbers_of,
    put_rows,
    round_rows,
    rows_at,
    split_memory,
    split_rows,
    widen_rows,
)
from halfmoon.kv.codec import Codec, decode
from halfmoon.kv.kv_layout import QUANTISED, FloatDtype
from tests.engine.coded_memory import memory_of

SIGNED = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}


def drawn(dtype: FloatDtype) -> torch.Tensor:
    """[1, 2, 3, 200, 48] of very unlike sizes, with what is not finite in one row."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 3, 200, 48)
    powers = 3 * torch.randn(shape, generator=generator) + torch.linspace(-120, 110, 200).view(200, 1)
    numbers = torch.randn(shape, generator=generator) * torch.exp2(powers.clamp(max=120))
    numbers[0, 0, 0, 9, :5] = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0])
    return numbers.to(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("dtype", SIGNED)
@pytest.mark.parametrize("kv", sorted(QUANTISED))
def test_rows_are_those_of_the_codec(dtype: FloatDtype, kv: Literal["int8", "fp8"]) -> None:
    numbers = drawn(dtype)
    raw = numbers.view(SIGNED[dtype]).numpy()
    expected = decode(Codec.RAW, raw.tobytes(), tuple(numbers.shape), dtype, kv)
    rows = round_rows(numbers, TORCH_DTYPES[kv])
    assert (rows.view(torch.uint8).numpy() == expected).all()
    widened = decode(Codec.RAW, expected.tobytes(), tuple(numbers.shape), kv, "float32").view(np.float32)
    assert (widen_rows(rows).numpy() == widened).all()


def test_fp8_is_the_e4m3_of_torch() -> None:
    numbers = drawn("float32").nan_to_num(posinf=1e38, neginf=-1e38)
    codes, scales = split_rows(round_rows(numbers, torch.uint8))
    inverse = 1 / scales.float().unsqueeze(-1)
    assert torch.equal(
        codes, (numbers.clamp(-(2.0**126), 2.0**126) * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert len(set(codes.flatten().tolist())) == 254  # all but the two for NaN
    assert ((codes & 0x7F) != 0x7F).all()


def test_only_codes_are_quantised() -> None:
    assert {dtype for dtype, memory in TORCH_DTYPES.items() if is_quantised(memory)} == QUANTISED
    numbers = torch.randn(2, 1, 4, 8)
    assert torch.equal(numbers_of(numbers), numbers)
    assert torch.equal(numbers_of(round_rows(numbers, torch.int8)), widen_rows(round_rows(numbers, torch.int8)))


@pytest.mark.parametrize("memory_dtype", [torch.int8, torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [slice(3, 9), torch.tensor([11, 0, 5])], ids=["run", "scattered"])
def test_rows_are_found_again_and_others_left_alone(memory_dtype: torch.dtype, slots: slice | torch.Tensor) -> None:
    rows = torch.arange(2 * 3 * 12 * 18).remainder(97).view(2, 3, 12, 18).to(memory_dtype)
    memory = memory_of(rows)
    assert torch.equal(rows_at(memory, slots), rows[..., slots, :])
    put_rows(memory, slots, rows.flip(3)[..., slots, :])
    rows[..., slots, :] = rows.flip(3)[..., slots, :]
    assert torch.equal(rows_at(memory, slice(None)), rows)


def test_codes_and_scales_of_a_head_are_dense_and_aligned() -> None:
    memory = torch.zeros(3, 2, 2, 5 * 8, 66, dtype=torch.int8)  # blocks of 8
    codes, scales = split_memory(memory[1])
    assert (codes.shape, scales.shape) == ((2, 2, 40, 64), (2, 2, 40))
    assert (codes.stride()[-2:], scales.stride(-1)) == ((64, 1), 1)
    for part in (*codes.flatten(0, 1), *scales.flatten(0, 1)):
        assert (part.data_ptr() - memory.data_ptr()) % 16 == 0
