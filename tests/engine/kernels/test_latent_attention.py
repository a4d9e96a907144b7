"""Attention over paged latents against its reference: sizes, heads, prompts, splits, padding rows, rows of codes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.conftest import Close

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from halfmoon.engine.kernels import latent_attention as kernels  # isort: skip
from halfmoon.engine.kernels.key_splits import MIN_SPLIT_TOKENS  # isort: skip
from halfmoon.engine.kernels.paged_kv import PagedKV  # isort: skip
from halfmoon.engine.kv_memory.quantised_rows import is_quantised  # isort: skip
from tests.engine.coded_memory import coded_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK_TOKENS = 16


def latents(
    contexts: Sequence[int], half: int, dtype: torch.dtype, device: str, block_tokens: int = BLOCK_TOKENS
) -> tuple[PagedKV, Tensor, Tensor]:
    """Sequences of random rows in scattered blocks. What no sequence covers is poisoned where the dtype has NaN."""
    generator = torch.Generator().manual_seed(11)
    needed = [-(-context // block_tokens) for context in contexts]
    ids = torch.randperm(sum(needed), generator=generator) + 1
    table = torch.zeros(len(contexts), max(1, *needed), dtype=torch.int32)
    layer = torch.full((2, 1, (sum(needed) + 1) * block_tokens, half), float("nan"))
    for seq, context in enumerate(contexts):
        blocks = ids[sum(needed[:seq]) : sum(needed[: seq + 1])]
        table[seq, : len(blocks)] = blocks
        for token in range(context):
            slot = int(blocks[token // block_tokens]) * block_tokens + token % block_tokens
            layer[:, 0, slot] = torch.randn(2, half, generator=generator)
    layer = coded_memory(layer.nan_to_num(), dtype) if is_quantised(dtype) else layer.to(dtype)
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    return PagedKV.of_layer(layer.to(device), block_tokens), table.to(device), lens


def query(num_tokens: int, num_heads: int, half: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_tokens, num_heads, 2 * half, generator=generator).to(device, dtype)


def check(assert_close: Close, *arguments: Any) -> Tensor:
    out: Tensor = kernels.latent_attention(*arguments)
    assert_close(out, kernels.latent_attention_reference(*arguments))
    return out


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_deepseeks_sizes(device: str, assert_close: Close, dtype: torch.dtype, num_splits: int) -> None:
    paged = latents([1, 70, 0, MIN_SPLIT_TOKENS + 40], 288, dtype, device)
    out = check(assert_close, query(4, 16, 288, dtype, device), *paged, 576**-0.5, 512, num_splits)
    assert out[2].eq(0).all()  # the row that pads a captured graph


@pytest.mark.parametrize(("half", "size"), [(32, 48), (32, 24), (20, 33), (72, 128)])
@pytest.mark.parametrize("num_heads", [3, 20, 64])
def test_other_sizes(device: str, assert_close: Close, half: int, size: int, num_heads: int) -> None:
    """Latents that end behind the first half of a row, or within it; heads of one program, and of several."""
    paged = latents([37, 5], half, FP16, device)
    check(assert_close, query(2, num_heads, half, FP16, device), *paged, 0.1, size)


@pytest.mark.parametrize("num_splits", [2, 8])
def test_split_boundaries(device: str, assert_close: Close, num_splits: int) -> None:
    minimum = MIN_SPLIT_TOKENS
    paged = latents([minimum - 1, minimum, minimum + 1, 2 * minimum + 1], 32, FP32, device, 64)
    check(assert_close, query(4, 4, 32, FP32, device), *paged, 0.1, 48, num_splits)


@pytest.mark.parametrize("block_tokens", [1, 24, 64])
def test_prompts_after_cached_tokens(device: str, assert_close: Close, block_tokens: int) -> None:
    cached, new = [0, 64, 5, 0, 33], [1, 1, 40, 17, 9]
    paged = latents([sum(one) for one in zip(cached, new, strict=True)], 32, FP16, device, block_tokens)
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device)
    check(assert_close, query(sum(new), 6, 32, FP16, device), *paged, 0.2, 48, 1, starts, max(new))


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
def test_rows_of_codes_have_a_scale_for_each_half(
    device: str, assert_close: Close, dtype: torch.dtype, codes: torch.dtype
) -> None:
    kv, table, lens = latents([50, 9], 32, codes, device)
    assert kv.v_scales is not None
    kv.v_scales.add_(1 << 7)  # the second halves are twice as large
    check(assert_close, query(2, 20, 32, dtype, device), kv, table, lens, 0.1, 48)


def test_a_strided_query(device: str, assert_close: Close) -> None:
    paged = latents([40, 9], 32, FP32, device)
    check(assert_close, query(2, 10, 32, FP32, device)[:, 2:6], *paged, 0.2, 48)


def test_what_does_not_fit_is_refused(device: str) -> None:
    paged = latents([9], 32, FP32, device)
    q = query(1, 4, 32, FP32, device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="latents of 64 numbers"):
        kernels.latent_attention(q, *paged, 0.1, 64)
    with pytest.raises(ValueError, match="q: shape"):
        kernels.latent_attention(q[..., :48], *paged, 0.1, 48)
    with pytest.raises(ValueError, match="not a power of two"):
        kernels.latent_attention(q, *paged, 0.1, 48, 3)
    with pytest.raises(ValueError, match="of decodes only"):
        kernels.latent_attention(q, *paged, 0.1, 48, 2, starts, 1)
    with pytest.raises(ValueError, match="of decodes only"):
        kernels.latent_attention(q.repeat(2, 1, 1), *paged, 0.1, 48)
    assert kernels.latent_attention(q[:0], paged[0], paged[1][:0], paged[2][:0], 0.1, 48).shape == (0, 4, 48)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_context_lens(device: str, assert_close: Close) -> None:
    kv, table, lens = latents([5000, 3000, 900, 4096], 288, BF16, device, 64)
    full = lens.clone()
    arguments = (query(4, 128, 288, BF16, device), kv, table, lens, 576**-0.5, 512, 16)
    kernels.latent_attention(*arguments)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.latent_attention(*arguments)
    for now in (full, torch.ones_like(full), full // 3, torch.zeros_like(full)):
        lens.copy_(now)
        graph.replay()
        assert_close(out, kernels.latent_attention_reference(*arguments))
