"""Storing K and V in the arena."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from halfmoon.engine.kernels.paged_kv import PagedKV

kernels = pytest.importorskip("halfmoon.engine.kernels.kv_write", reason="triton is missing (extra `gpu`)")
paged_kv = pytest.importorskip("halfmoon.engine.kernels.paged_kv", reason="triton is missing (extra `gpu`)")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUM_HEADS, NUM_SLOTS = 3, 64


def empty_kv(dtype: torch.dtype, head_dim: int, device: str) -> PagedKV:
    k, v = (torch.full((NUM_HEADS, NUM_SLOTS, head_dim), 7.0, device=device).to(dtype) for _ in range(2))
    kv: PagedKV = paged_kv.PagedKV(k, v, 8)
    return kv


def fused(num_tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """K and V as views into a fused projection."""
    generator = torch.Generator().manual_seed(2)
    heads = torch.randn(num_tokens, 3 * NUM_HEADS, head_dim, generator=generator).to(device, dtype)
    return heads[:, NUM_HEADS : 2 * NUM_HEADS], heads[:, 2 * NUM_HEADS :]


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_every_slot_is_written_or_left_alone(device: str, dtype: torch.dtype, head_dim: int, num_tokens: int) -> None:
    k, v = fused(num_tokens, head_dim, dtype, device)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:num_tokens].to(device)
    slots[1::5] = -1
    actual, expected = empty_kv(dtype, head_dim, device), empty_kv(dtype, head_dim, device)
    kernels.kv_write(k, v, actual, slots)
    kernels.kv_write_reference(k, v, expected, slots)
    assert torch.equal(actual.k, expected.k)
    assert torch.equal(actual.v, expected.v)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
def test_rows_are_rounded_as_by_torch(device: str, dtype: torch.dtype, codes: torch.dtype) -> None:
    """Numbers of very unlike sizes in a row, so that codes of all exponents occur."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(2, 60, NUM_HEADS, 80, generator=generator)
    numbers *= torch.exp2(4 * torch.randn(numbers.shape, generator=generator))
    numbers[0, 7, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    k, v = numbers.to(device, dtype)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:60].to(device)
    layers = [torch.zeros(2, NUM_HEADS, NUM_SLOTS, 82, dtype=codes, device=device) for _ in range(2)]
    kernels.kv_write(k, v, paged_kv.PagedKV.of_layer(layers[0], 8), slots)
    kernels.kv_write_reference(k, v, paged_kv.PagedKV.of_layer(layers[1], 8), slots)
    assert torch.equal(layers[0], layers[1])
    assert len(set(layers[0].flatten().tolist())) > 250  # of 256


def test_no_slot_at_all(device: str) -> None:
    k, v = fused(4, 64, FP32, device)
    kv = empty_kv(FP32, 64, device)
    kernels.kv_write(k, v, kv, torch.full((4,), -1, dtype=torch.int64, device=device))
    kernels.kv_write(k[:0], v[:0], kv, torch.empty(0, dtype=torch.int64, device=device))
    assert kv.k.eq(7).all()
    assert kv.v.eq(7).all()


def test_what_the_interpreter_gets_wrong_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here")
    with pytest.raises(TypeError, match="computes bfloat16 incorrectly"):
        empty_kv(BF16, 64, "cpu")


def test_what_does_not_fit_is_refused(device: str) -> None:
    k, v = fused(2, 64, FP32, device)
    kv, slots = empty_kv(FP32, 64, device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="k: shape"):
        kernels.kv_write(k[:, :2], v[:, :2], kv, slots)
    with pytest.raises(TypeError, match="k: dtype"):
        kernels.kv_write(k.half(), v.half(), kv, slots)
    with pytest.raises(TypeError, match="slot_mapping"):
        kernels.kv_write(k, v, kv, slots.int())


def test_a_paged_kv_that_does_not_fit_is_refused(device: str) -> None:
    kv = empty_kv(FP32, 64, device)
    with pytest.raises(ValueError, match="whole blocks"):
        replace(kv, block_tokens=7)
    with pytest.raises(ValueError, match="v: shape"):
        replace(kv, v=kv.v[:, :8])
    with pytest.raises(ValueError, match="slots must be dense"):
        replace(kv, k=kv.k[:, ::2], v=kv.v[:, ::2])
    wide = torch.zeros(1, 8, 512, device=device)
    with pytest.raises(ValueError, match="head size"):
        paged_kv.PagedKV(wide, wide.clone(), 8).check_query(torch.zeros(1, 1, 512, device=device))
