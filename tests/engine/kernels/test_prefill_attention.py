"""Prefill attention over a cached prefix against its reference: chunks, groups, dtypes, tails."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.conftest import Close, MakePaged

kernels = pytest.importorskip("halfmoon.engine.kernels.prefill_attention", reason="triton is missing (extra `gpu`)")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU = pytest.mark.gpu


def packed(new: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Queries of all new tokens and cu_seqlens."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(sum(new), num_heads, head_dim, generator=generator).to(device, dtype)
    return q, torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device)


def check(
    make_paged: MakePaged,
    assert_close: Close,
    device: str,
    cached: list[int],
    new: list[int],
    dtype: torch.dtype,
    group: int = 2,
    **shape: int,
) -> None:
    contexts = [before + more for before, more in zip(cached, new, strict=True)]
    kv, table, lens = make_paged(contexts, dtype, **shape)
    head_dim = kv.k.shape[2]
    q, starts = packed(new, group * kv.k.shape[0], head_dim, dtype, device)
    arguments = (q, kv, table, starts, lens, max(new), head_dim**-0.5)
    assert_close(kernels.prefill_attention(*arguments), kernels.prefill_attention_reference(*arguments))


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=GPU)])
def test_ragged_batch(make_paged: MakePaged, device: str, assert_close: Close, dtype: torch.dtype) -> None:
    cached, new = [0, 64, 5, 0, 130], [1, 1, 90, 64, 33]
    check(make_paged, assert_close, device, cached, new, dtype)


@pytest.mark.parametrize("group", [1, 3, 8, 20])
def test_groups(make_paged: MakePaged, device: str, assert_close: Close, group: int) -> None:
    check(make_paged, assert_close, device, [0, 70], [50, 21], FP16, group)


@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_head_sizes(make_paged: MakePaged, device: str, assert_close: Close, head_dim: int) -> None:
    check(make_paged, assert_close, device, [3, 100], [40, 70], FP16, head_dim=head_dim)


@pytest.mark.parametrize("block_tokens", [1, 8, 24, 128])
def test_block_sizes_other_than_the_tile(
    make_paged: MakePaged, device: str, assert_close: Close, block_tokens: int
) -> None:
    check(make_paged, assert_close, device, [31, 100], [70, 5], FP32, block_tokens=block_tokens)


@pytest.mark.parametrize("num_new", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("num_cached", [0, 62, 63, 64])
def test_tile_boundaries(
    make_paged: MakePaged, device: str, assert_close: Close, num_cached: int, num_new: int
) -> None:
    check(make_paged, assert_close, device, [num_cached], [num_new], FP16, group=1, num_kv_heads=1)


def test_a_sequence_without_new_tokens(make_paged: MakePaged, device: str, assert_close: Close) -> None:
    check(make_paged, assert_close, device, [10, 20, 0], [4, 0, 6], FP32)


def test_what_does_not_fit_is_refused(make_paged: MakePaged, device: str) -> None:
    kv, table, lens = make_paged([9], FP32)
    q, starts = packed([9], 4, 64, FP32, device)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kernels.prefill_attention(q, kv, table, starts[:1], lens, 9, 0.1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        kernels.prefill_attention(q, kv, table, starts, lens, 10, 0.1)
    with pytest.raises(ValueError, match="q: shape"):
        kernels.prefill_attention(q[..., :32], kv, table, starts, lens, 9, 0.1)


@pytest.mark.gpu
def test_llama_8b_shapes(make_paged: MakePaged, device: str, assert_close: Close) -> None:
    shape = {"num_kv_heads": 8, "head_dim": 128}
    check(make_paged, assert_close, device, [0, 3000, 1], [2048, 512, 1], BF16, group=4, **shape)
