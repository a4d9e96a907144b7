"""Weights in blocks: each format multiplies as its numbers do, with the same bits in any batch and on any processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.models.blocks import BLOCK_SIZES, BlockFormat, Blocks
from halfmoon.engine.native.block_kernels import PackedBlocks
from halfmoon.engine.native.compiler import compiled
from halfmoon.engine.native.library import NativeLibrary
from tests.engine.gguf_files import random_blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # of all summands' sizes together
ROUNDED = {torch.float32: 1e-3, torch.bfloat16: 1e-2}  # of the largest result
FORMATS = list(BLOCK_SIZES)
CODE_BYTES = {  # of a block
    "Q4_0": slice(2, 18),
    "Q4_1": slice(4, 20),
    "Q5_0": slice(2, 22),
    "Q5_1": slice(4, 24),
    "Q8_0": slice(2, 34),
    "IQ4_NL": slice(2, 18),
    "Q3_K": slice(0, 96),
    "Q4_K": slice(16, 144),
    "Q5_K": slice(16, 176),
    "Q6_K": slice(0, 192),
    "IQ4_XS": slice(8, 136),
}


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


def library(dtype: torch.dtype, num_threads: int = 2) -> NativeLibrary:
    return NativeLibrary(compiled(default_cache_dir()), dtype, num_threads)


def blocks_of(block_format: BlockFormat, num_columns: int, num_inputs: int) -> Blocks:
    return Blocks(block_format, torch.from_numpy(random_blocks(block_format, num_columns, num_inputs)))


def numbers(blocks: Blocks) -> Tensor:
    return torch.from_numpy(dequantize(blocks.data.numpy(), GGMLQuantizationType[blocks.format]).astype(np.float32))


def rounded(x: Tensor) -> Tensor:
    """x in eight bits for each 32 numbers, as the kernels round it."""
    groups = x.float().view(x.shape[0], -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, groups * (127 / largest), 0).round()
    return (codes * (largest / 127)).view(x.shape)


def random_x(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    x[0, :32] = 0
    return x


def packed(blocks: Blocks, dtype: torch.dtype, num_threads: int = 2) -> PackedBlocks:
    multiply = library(dtype, num_threads).pack_weight(blocks)
    assert isinstance(multiply, PackedBlocks)
    return multiply


@pytest.mark.parametrize("num_rows", [1, 3, 15, 70])
@pytest.mark.parametrize(("num_columns", "num_inputs"), [(96, 768), (30, 256), (1, 1536)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("block_format", FORMATS)
def test_blocks_multiply_as_their_numbers_do(
    dtype: torch.dtype, block_format: BlockFormat, num_rows: int, num_columns: int, num_inputs: int, with_bias: bool
) -> None:
    blocks, x = blocks_of(block_format, num_columns, num_inputs), random_x(num_rows, num_inputs, dtype)
    bias = random_x(2, num_columns, dtype)[1] if with_bias else None
    added = torch.zeros(num_columns) if bias is None else bias.float()
    expected = functional.linear(rounded(x), numbers(blocks), added)
    summands = functional.linear(rounded(x).abs(), numbers(blocks).abs(), added.abs())
    got = packed(blocks, dtype)(x, bias)
    assert ((got.float() - expected).abs() <= TOLERANCE[dtype] * summands).all()


@pytest.mark.parametrize("num_rows", [9, 36])
@pytest.mark.parametrize("codes", [0, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("block_format", FORMATS)
def test_the_largest_products_are_added_whole(block_format: BlockFormat, codes: int, num_rows: int) -> None:
    """All of one sign, and as large as they can be: nothing that is narrower than they holds them."""
    blocks = blocks_of(block_format, 20, 512)
    size = BLOCK_SIZES[block_format][1]
    blocks.data.view(-1, size)[:, CODE_BYTES[block_format]] = codes
    x = torch.ones(num_rows, 512) * torch.tensor([1, -1, 1, -1, 3, -3, 1, 1, -1]).repeat(4)[:num_rows].view(-1, 1)
    expected = x.double() @ numbers(blocks).double().T
    torch.testing.assert_close(packed(blocks, torch.float32)(x, None).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("block_format", FORMATS)
def test_rows_of_a_table_in_blocks(dtype: torch.dtype, block_format: BlockFormat) -> None:
    blocks = blocks_of(block_format, 45, 512)
    indices = torch.tensor([0, 44, 17, 17, 16])
    torch.testing.assert_close(packed(blocks, dtype).rows(indices), numbers(blocks)[indices].to(dtype))


@pytest.mark.parametrize("block_format", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    dtype: torch.dtype, block_format: BlockFormat
) -> None:
    blocks, x = blocks_of(block_format, 100, 768), random_x(150, 768, dtype)
    whole = packed(blocks, dtype, 1)(x, None)
    for num_threads in (1, 3):
        multiply = packed(blocks, dtype, num_threads)
        few = [(num_rows, 2 * num_rows) for num_rows in range(1, 9)]
        for start, end in (*few, (0, 1), (1, 3), (2, 9), (60, 70), (0, 64), (7, 150), (149, 150)):
            assert torch.equal(multiply(x[start:end], None), whole[start:end]), (start, end, num_threads)


@pytest.mark.parametrize("num_inputs", [768, 1792])  # of which tasks by tiles have 512 rows, and half as many
def test_a_row_among_many_has_the_bits_that_it_has_alone(dtype: torch.dtype, num_inputs: int) -> None:
    """More rows than a task has, and more strips than threads need, which would make tasks shorter."""
    blocks, x = blocks_of("Q5_K", 260, num_inputs), random_x(1100, num_inputs, dtype)
    alone = packed(blocks, dtype, 1)
    whole = torch.cat([alone(x[at : at + 1], None) for at in range(len(x))])
    for num_threads in (1, 3):
        multiply = packed(blocks, dtype, num_threads)
        for end in (511, 513, 1100):
            assert torch.equal(multiply(x[:end], None), whole[:end]), (end, num_threads)


@pytest.mark.parametrize(
    "flags",
    [
        "-DEMULATE_AMX",
        "-mno-amx-int8",
        "-mno-avx512vnni",
        "-mno-avx512f",
        "-mno-avx512f -mno-avxvnni",
        "-mno-avx2 -mno-fma",
    ],
)
def test_other_processors_compute_the_same(flags: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit where products and sums are rounded together; else to the last of float32.

    Rows are enough for tiles; columns and inputs make a last task of one strip and parts of a strip that differ.
    """
    processor = Path("/proc/cpuinfo").read_text()
    if "avx512_vnni" not in processor or ("amx" in flags and "amx_int8" not in processor):
        pytest.skip("this processor's own path is one of those")
    monkeypatch.setenv("CC", f"cc {flags}")
    other = NativeLibrary(compiled(default_cache_dir()), dtype, 2)
    monkeypatch.delenv("CC")
    for block_format in FORMATS:
        for num_inputs in (768, 1792, 800):
            if num_inputs % BLOCK_SIZES[block_format][0]:
                continue
            blocks, x = blocks_of(block_format, 70, num_inputs), random_x(85, num_inputs, dtype)
            multiply = other.pack_weight(blocks)
            assert multiply is not None
            own, others = packed(blocks, dtype)(x, None), multiply(x, None)
            if "fma" in flags:
                torch.testing.assert_close(others, own, atol=ROUNDED[dtype] * float(own.abs().max()), rtol=0)
            else:
                assert torch.equal(others, own), (block_format, num_inputs)


@pytest.mark.parametrize("num_rows", [1, 70])
def test_what_comes_before_a_product_may_be_part_of_it(dtype: torch.dtype, num_rows: int) -> None:
    kernels, multiply = library(dtype), packed(blocks_of("Q4_1", 100, 768), dtype)
    x, gate_up = random_x(num_rows, 768, torch.float32), random_x(num_rows, 1536, dtype)
    weight, residual = random_x(2, 768, dtype)[1], random_x(num_rows + 1, 768, torch.float32)[1:]
    totals = residual.clone(), residual.clone()
    expected = multiply(kernels.add_rms_norm(x, totals[0], weight, 1e-5), None)
    assert torch.equal(multiply.normed(x, totals[1], weight, 1e-5, None), expected)
    assert torch.equal(totals[1], totals[0])
    assert torch.equal(multiply.gated(gate_up, None), multiply.sums(kernels.silu_mul(gate_up), None))


@pytest.mark.parametrize("num_rows", [1, 70])
def test_sums_are_what_is_rounded(dtype: torch.dtype, num_rows: int) -> None:
    multiply, bias = packed(blocks_of("Q8_0", 83, 768), dtype), random_x(2, 83, dtype)[1]
    x = random_x(num_rows, 768, dtype)
    sums = multiply.sums(x, bias)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.to(dtype), multiply(x, bias))


@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_number_is_not_hidden(dtype: torch.dtype, what: float, num_rows: int) -> None:
    x = random_x(num_rows, 64, dtype)
    x[1, 40] = what
    out = packed(blocks_of("Q4_1", 20, 64), dtype)(x, None)
    assert out[0].isfinite().all()
    assert out[2:].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("block_format", FORMATS)
def test_a_packed_weight_is_as_large_as_its_blocks(block_format: BlockFormat) -> None:
    """But for whole-numbered scales, of which each takes a byte."""
    blocks = blocks_of(block_format, 128, 512)
    more = {"Q3_K": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}.get(block_format, 0)  # bytes of a block of 256
    assert packed(blocks, torch.float32).num_bytes == blocks.data.nbytes + 128 * 2 * more
