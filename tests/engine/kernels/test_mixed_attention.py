"""Attention of decodes and prefills in one launch against its reference, and against the kernels that it unites."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.coded_memory import coded_memory
from tests.engine.kernels.conftest import Close, MakePaged

kernels = pytest.importorskip("halfmoon.engine.kernels.mixed_attention", reason="triton is missing (extra `gpu`)")
decode = pytest.importorskip("halfmoon.engine.kernels.decode_attention")
key_splits = pytest.importorskip("halfmoon.engine.kernels.key_splits")
paged_kv = pytest.importorskip("halfmoon.engine.kernels.paged_kv")
prefill = pytest.importorskip("halfmoon.engine.kernels.prefill_attention")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU = pytest.mark.gpu


def mixed(
    make_paged: MakePaged,
    decodes: list[int],
    cached: list[int],
    new: list[int],
    dtype: torch.dtype,
    group: int = 2,
    num_splits: int = 1,
    **shape: int,
) -> tuple[Any, ...]:
    """Arguments of `mixed_attention`: contexts of decodes; cached and new tokens of prefills."""
    contexts = decodes + [before + more for before, more in zip(cached, new, strict=True)]
    kv, table, lens = make_paged(contexts, dtype, **shape)
    num_kv_heads, _, head_dim = kv.k.shape
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(decodes) + sum(new), group * num_kv_heads, head_dim, generator=generator).to(kv.k)
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=kv.k.device)
    first, rest = table[: len(decodes)].clone(), table[len(decodes) :].clone()
    return (
        q,
        kv,
        kernels.Decodes(first, lens[: len(decodes)].clone(), num_splits),
        kernels.Prefills(rest, starts, lens[len(decodes) :].clone(), max(new)),
        head_dim**-0.5,
    )


def check(assert_close: Close, arguments: tuple[Any, ...]) -> Tensor:
    out: Tensor = kernels.mixed_attention(*arguments)
    assert_close(out, kernels.mixed_attention_reference(*arguments))
    return out


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=GPU)])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_ragged_batch(make_paged: MakePaged, assert_close: Close, dtype: torch.dtype, num_splits: int) -> None:
    decodes, cached, new = [1, 63, 64, 65, 300], [0, 64, 5, 0], [1, 1, 90, 64]
    check(assert_close, mixed(make_paged, decodes, cached, new, dtype, num_splits=num_splits))


@pytest.mark.parametrize("group", [1, 3, 8, 20])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_groups_and_head_sizes(make_paged: MakePaged, assert_close: Close, group: int, head_dim: int) -> None:
    check(assert_close, mixed(make_paged, [70, 3], [0, 40], [50, 21], FP16, group, head_dim=head_dim))


@pytest.mark.parametrize("block_tokens", [1, 24, 128])
def test_block_sizes_other_than_the_tile(make_paged: MakePaged, assert_close: Close, block_tokens: int) -> None:
    check(assert_close, mixed(make_paged, [33, 130], [31, 100], [70, 5], FP32, block_tokens=block_tokens))


def test_a_long_decode_beside_a_short_prefill(make_paged: MakePaged, assert_close: Close) -> None:
    check(
        assert_close,
        mixed(make_paged, [4 * key_splits.MIN_SPLIT_TOKENS + 77], [3], [2], FP32, num_splits=4, num_kv_heads=1),
    )


def test_a_padding_row_and_a_sequence_without_new_tokens(make_paged: MakePaged, assert_close: Close) -> None:
    out = check(assert_close, mixed(make_paged, [9, 0], [10, 20, 0], [4, 0, 6], FP32, num_splits=2))
    assert out[1].eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_decodes_have_the_bits_of_a_step_of_decodes(
    make_paged: MakePaged, assert_close: Close, num_splits: int
) -> None:
    q, kv, decodes, prefills, scale = mixed(make_paged, [600, 5], [0], [70], FP16, num_splits=num_splits)
    out = kernels.mixed_attention(q, kv, decodes, prefills, scale)
    table, lens, _ = decodes
    assert torch.equal(out[:2], decode.decode_attention(q[:2], kv, table, lens, scale, num_splits))
    assert_close(out[2:], prefill.prefill_attention(q[2:], kv, *prefills, scale))  # tiles of another size


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
def test_rows_of_codes(device: str, assert_close: Close, codes: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    layer = coded_memory(torch.randn(2, 2, 4 * 64, 64, generator=generator).to(device), codes)
    kv = paged_kv.PagedKV.of_layer(layer, 64)
    q = torch.randn(2 + 40, 4, 64, generator=generator).to(device)
    table = torch.tensor([[2], [1], [3], [0]], dtype=torch.int32, device=device)
    lens = torch.tensor([64, 7, 30, 33], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 30, 40], dtype=torch.int32, device=device)
    prefills = kernels.Prefills(table[2:].clone(), starts, lens[2:].clone(), 30)
    check(assert_close, (q, kv, kernels.Decodes(table[:2].clone(), lens[:2].clone(), 2), prefills, 0.125))


def test_a_strided_query(make_paged: MakePaged, assert_close: Close) -> None:
    q, *others = mixed(make_paged, [40, 9], [0], [20], FP32)
    wide = torch.cat((q, q, q), dim=1)[:, 4:8]  # as sliced from a fused projection
    check(assert_close, (wide, *others))


@pytest.mark.parametrize(("num_decodes", "new"), [(1, [200]), (17, [1]), (7, [40, 90]), (2, [3, 1, 1, 1, 1])])
def test_every_program_is_taken_once_at_any_ratio(
    make_paged: MakePaged, assert_close: Close, monkeypatch: pytest.MonkeyPatch, num_decodes: int, new: list[int]
) -> None:
    """A program that is left out leaves its rows as `torch.empty` gave them: here poisoned."""
    arguments = mixed(make_paged, [5] * num_decodes, [0] * len(new), new, FP32, num_kv_heads=1)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, float("nan"), **options))
    check(assert_close, arguments)


def test_what_does_not_fit_is_refused(make_paged: MakePaged) -> None:
    q, kv, decodes, prefills, scale = mixed(make_paged, [5, 9], [0], [4], FP32)
    with pytest.raises(ValueError, match="2 of 2 rows are decodes"):
        kernels.mixed_attention(q[:2], kv, decodes, prefills, scale)
    with pytest.raises(ValueError, match="0 of 6 rows are decodes"):
        kernels.mixed_attention(q, kv, decodes._replace(block_table=decodes.block_table[:0]), prefills, scale)
    with pytest.raises(ValueError, match="not a power of two"):
        kernels.mixed_attention(q, kv, decodes._replace(num_splits=3), prefills, scale)
    with pytest.raises(ValueError, match="max_new_tokens"):
        kernels.mixed_attention(q, kv, decodes, prefills._replace(max_new_tokens=5), scale)
    with pytest.raises(TypeError, match="block_table"):
        kernels.mixed_attention(q, kv, decodes, prefills._replace(block_table=prefills.block_table.long()), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
def test_llama_8b_shapes(make_paged: MakePaged, assert_close: Close, num_splits: int) -> None:
    shape = {"num_kv_heads": 8, "head_dim": 128}
    arguments = mixed(make_paged, [8192, 1, 1000], [0, 3000, 1], [2048, 512, 1], BF16, 4, num_splits, **shape)
    check(assert_close, arguments)
