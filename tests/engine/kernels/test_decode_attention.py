"""Paged decode attention against its reference: groups, dtypes, tails, splits, padding rows, captured graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfmoon.engine.kv_memory.quantised_rows import CODES, put_rows
from tests.engine.kernels.conftest import Close, MakePaged

kernels = pytest.importorskip("halfmoon.engine.kernels.decode_attention", reason="triton is missing (extra `gpu`)")
key_splits = pytest.importorskip("halfmoon.engine.kernels.key_splits", reason="triton is missing (extra `gpu`)")
paged_kv = pytest.importorskip("halfmoon.engine.kernels.paged_kv", reason="triton is missing (extra `gpu`)")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU = pytest.mark.gpu


def query(num_seqs: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_seqs, num_heads, head_dim, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=GPU)])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_dtypes_and_ragged_contexts(
    make_paged: MakePaged,
    device: str,
    assert_close: Close,
    dtype: torch.dtype,
    num_splits: int,
) -> None:
    paged = make_paged([1, 63, 64, 65, 0, 300], dtype)
    q = query(6, 6, 64, dtype, device)
    arguments = (q, *paged, 0.125, num_splits)
    out = kernels.decode_attention(*arguments)
    assert_close(out, kernels.decode_attention_reference(*arguments))
    assert out[4].eq(0).all()  # the row that pads a captured graph


@pytest.mark.parametrize("group", [1, 3, 8, 20])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_groups_and_head_sizes(
    make_paged: MakePaged, device: str, assert_close: Close, group: int, head_dim: int
) -> None:
    paged = make_paged([70, 130], FP16, head_dim=head_dim)
    arguments = (query(2, 2 * group, head_dim, FP16, device), *paged, head_dim**-0.5, 1)
    assert_close(kernels.decode_attention(*arguments), kernels.decode_attention_reference(*arguments))


@pytest.mark.parametrize("block_tokens", [1, 8, 24, 128, 256])
def test_block_sizes_other_than_the_tile(
    make_paged: MakePaged, device: str, assert_close: Close, block_tokens: int
) -> None:
    paged = make_paged([5, 129, 200], FP32, head_dim=128, block_tokens=block_tokens)
    arguments = (query(3, 4, 128, FP32, device), *paged, 0.1, 1)
    assert_close(kernels.decode_attention(*arguments), kernels.decode_attention_reference(*arguments))


@pytest.mark.parametrize("num_splits", [2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_split_boundaries(
    make_paged: MakePaged, device: str, assert_close: Close, num_splits: int, head_dim: int
) -> None:
    minimum = key_splits.MIN_SPLIT_TOKENS
    contexts = [minimum - 1, minimum, minimum + 1, 2 * minimum, 2 * minimum + 1]
    paged = make_paged(contexts, FP32, num_kv_heads=1, head_dim=head_dim)
    arguments = (query(5, 2, head_dim, FP32, device), *paged, 0.1, num_splits)
    assert_close(kernels.decode_attention(*arguments), kernels.decode_attention_reference(*arguments))


def test_long_contexts_are_shared_by_all_splits(make_paged: MakePaged, device: str, assert_close: Close) -> None:
    paged = make_paged([4 * key_splits.MIN_SPLIT_TOKENS + 77], FP32, num_kv_heads=1)
    arguments = (query(1, 2, 64, FP32, device), *paged, 0.125, 4)
    assert_close(kernels.decode_attention(*arguments), kernels.decode_attention_reference(*arguments))


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=GPU)])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
def test_every_code_is_the_number_that_torch_reads(device: str, dtype: torch.dtype, codes: torch.dtype) -> None:
    """A sequence of one token gets its value: codes whose scale is 1."""
    rows = torch.arange(256, dtype=torch.uint8).view(2, 128)
    rows[:, 127] = 0 if codes is torch.uint8 else rows[:, 127]  # e4m3's NaN
    layer = torch.zeros(2, 1, 2 * 64, 130, dtype=codes)
    scale = torch.ones(2, 1, dtype=BF16).view(torch.uint8)
    put_rows(layer[1, 0], slice(0, None, 64), torch.cat((rows, scale), dim=1).view(codes))
    kv = paged_kv.PagedKV.of_layer(layer.to(device), 64)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    out = kernels.decode_attention(torch.zeros(2, 1, 128, dtype=dtype, device=device), kv, table, lens, 1.0, 1)
    assert torch.equal(out[:, 0].float().cpu(), rows.view(CODES[codes]).float())


def test_a_strided_query(make_paged: MakePaged, device: str, assert_close: Close) -> None:
    paged = make_paged([40, 9], FP32)
    q = query(2, 10, 64, FP32, device)[:, 2:6]  # as sliced from a fused projection
    arguments = (q, *paged, 0.125, 1)
    assert_close(kernels.decode_attention(*arguments), kernels.decode_attention_reference(*arguments))


def test_no_sequences(make_paged: MakePaged, device: str) -> None:
    paged = make_paged([5], FP32)
    out = kernels.decode_attention(
        query(0, 4, 64, FP32, device), paged.kv, paged.block_table[:0], paged.context_lens[:0], 0.125, 1
    )
    assert out.shape == (0, 4, 64)


def test_what_does_not_fit_is_refused(make_paged: MakePaged, device: str) -> None:
    paged = make_paged([5], FP32)
    q = query(1, 4, 64, FP32, device)
    with pytest.raises(ValueError, match="query heads cannot share"):
        kernels.decode_attention(q[:, :3], *paged, 0.1, 1)
    with pytest.raises(ValueError, match="not a power of two"):
        kernels.decode_attention(q, *paged, 0.1, 3)
    with pytest.raises(TypeError, match="q: dtype"):
        kernels.decode_attention(q.half(), *paged, 0.1, 1)
    with pytest.raises(ValueError, match="last dimension must be dense"):
        kernels.decode_attention(query(1, 4, 128, FP32, device)[..., ::2], *paged, 0.1, 1)
    with pytest.raises(TypeError, match="block_table"):
        kernels.decode_attention(q, paged.kv, paged.block_table.long(), paged.context_lens, 0.1, 1)
    with pytest.raises(ValueError, match="context_lens"):
        kernels.decode_attention(q, paged.kv, paged.block_table, paged.context_lens.repeat(2), 0.1, 1)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_context_lens(make_paged: MakePaged, device: str, assert_close: Close) -> None:
    paged = make_paged([5000, 3000, 900, 4096], BF16, num_kv_heads=8, head_dim=128)
    q = query(4, 32, 128, BF16, device)
    full = paged.context_lens.clone()
    arguments = (q, *paged, 0.09, 16)
    kernels.decode_attention(*arguments)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.decode_attention(*arguments)
    for lens in (full, torch.ones_like(full), full // 3, torch.zeros_like(full)):
        paged.context_lens.copy_(lens)
        graph.replay()
        assert_close(out, kernels.decode_attention_reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 32])
def test_llama_8b_shapes(make_paged: MakePaged, device: str, assert_close: Close, num_splits: int) -> None:
    paged = make_paged([8192, 1, 1000], BF16, num_kv_heads=8, head_dim=128)
    arguments = (query(3, 32, 128, BF16, device), *paged, 128**-0.5, num_splits)
    assert_close(kernels.decode_attention(*arguments), kernels.decode_attention_reference(*arguments))
