"""The native kernels compute what plain torch computes, in both dtypes, also where sizes are not whole vectors.

`amx`: in bfloat16 over the emulation of AMX in amx.h, whatever the processor has.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.attention.attention import SdpaBackend, attend_reference
from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.kv_memory.quantised_rows import CODES, put_rows, round_rows, rows_at
from halfmoon.engine.models.linear import KeepsSums
from halfmoon.engine.models.rotary import rotate
from halfmoon.engine.native.attention import NativeBackend
from halfmoon.engine.native.compiler import _compilers, compiled
from halfmoon.engine.native.library import NativeLibrary
from halfmoon.errors import Incompatible
from tests.engine.coded_memory import coded_memory

BLOCK_TOKENS = 16
NUM_BLOCKS = 160
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
KINDS = ["float32", "bfloat16", "amx"]
HEADS = [(9, 3, 64), (4, 4, 16), (8, 2, 80), (8, 1, 128), (2, 2, 256), (192, 1, 32)]  # query heads, KV heads, head size
ATTENTION = [(kind, *heads) for kind in KINDS for heads in (HEADS[:3] if kind == "amx" else HEADS)]


@cache
def kernels(kind: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "amx":
            patch.setenv("CC", " ".join([*_compilers()[0], "-DEMULATE_AMX"]))
        return compiled(default_cache_dir())


def library_of(kind: str, num_threads: int) -> NativeLibrary:
    """Skips AMX on processors whose kernels have no pairs of bfloat16."""
    library = NativeLibrary(kernels(kind), torch.float32 if kind == "float32" else torch.bfloat16, num_threads)
    if kind == "amx" and library.bf16_instructions != "amx_bf16":
        pytest.skip("items are pairs of bfloat16 with AVX-512 BF16 only")
    return library


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return library_of(request.param, 2)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def spans(draw: st.DrawFn) -> list[TokenSpan]:
    """A few sequences over scattered or neighbouring blocks: decodes, first and later chunks, long and short."""
    free = list(draw(st.permutations(range(NUM_BLOCKS)))) if draw(st.booleans()) else list(range(NUM_BLOCKS))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        past = draw(st.integers(0, 500))
        new = draw(st.sampled_from((1, 1, 2, 15, 33, 100)))
        num_blocks = -(-(past + new) // BLOCK_TOKENS)
        drawn.append(TokenSpan(free[:num_blocks], past, past + new))
        free = free[num_blocks:]
    return drawn


@pytest.mark.parametrize(("kind", "num_heads", "num_kv_heads", "head_dim"), ATTENTION)
@settings(max_examples=25)
@given(drawn=spans(), seed=st.integers(0, 99), num_threads=st.sampled_from((1, 2, 5)))
@pytest.mark.parametrize("codes", [None, torch.int8, torch.uint8], ids=["", "int8", "e4m3"])
def test_attention_equals_the_reference(
    kind: str,
    codes: torch.dtype | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    drawn: list[TokenSpan],
    seed: int,
    num_threads: int,
) -> None:
    library = library_of(kind, num_threads)
    dtype = library.dtype
    num_tokens = sum(end - start for _, start, end in drawn)
    heads = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=seed)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)  # with a stride, as a model has them
    memory = random(2, num_kv_heads, NUM_BLOCKS * BLOCK_TOKENS, head_dim, dtype=dtype, seed=seed + 1)
    memory = coded_memory(memory, codes)
    unseen = ~seen_slots(drawn)  # uncomputed rows, and scales, are NaN, and must not matter
    put_rows(memory, unseen, torch.full_like(rows_at(memory, unseen).view(torch.int8), -1).view(memory.dtype))
    memories = memory.clone(), memory.clone()
    backend = NativeBackend(library, BLOCK_TOKENS, num_heads, num_kv_heads, head_dim)
    batch, plain = backend.step(drawn), SdpaBackend(BLOCK_TOKENS, "cpu").step(drawn)
    for _ in range(2):  # a step has many layers
        got = batch.attend(q, k, v, memories[0], AttentionRule(head_dim**-0.5))
        expected = attend_reference(q, k, v, memories[1], plain, AttentionRule(head_dim**-0.5))
        assert torch.equal(memories[0].view(torch.uint8), memories[1].view(torch.uint8))
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(memories[0], memories[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slope", [-0.3, -0.05, 0.0, 0.02, 0.08, 0.1, 0.3])
@pytest.mark.parametrize("num_new", [1, 90])
@pytest.mark.parametrize("codes", [None, torch.int8], ids=["", "int8"])
def test_scores_that_climb_along_the_sequence(
    library: NativeLibrary, codes: torch.dtype | None, num_new: int, slope: float
) -> None:
    """By less than what a kept maximum may be exceeded by in a tile, about as much, and more; or they fall."""
    dtype, num_tokens, head_dim = library.dtype, 700, 32
    q, k, v = (random(num_new, heads, head_dim, dtype=torch.float32, seed=heads) for heads in (6, 2, 2))
    memory = random(2, 2, NUM_BLOCKS * BLOCK_TOKENS, head_dim, dtype=torch.float32, seed=3)
    climbing = slope * (torch.arange(memory.shape[2]) - (num_tokens if slope > 0 else 0))
    q[..., 0], memory[0, :, :, 0], k[..., 0] = 1, climbing, climbing[num_tokens - num_new : num_tokens, None]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    memories = coded_memory(memory.to(dtype), codes), coded_memory(memory.to(dtype), codes)
    span = TokenSpan(range(-(-num_tokens // BLOCK_TOKENS)), num_tokens - num_new, num_tokens)
    batch = NativeBackend(library, BLOCK_TOKENS, 6, 2, head_dim).step([span])
    plain = SdpaBackend(BLOCK_TOKENS, "cpu").step([span])
    got = batch.attend(q, k, v, memories[0], AttentionRule(1.0))
    expected = attend_reference(q, k, v, memories[1], plain, AttentionRule(1.0))
    tolerance = max(TOLERANCE[dtype], 1e-4)  # scores are up to 210
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@st.composite
def ways(draw: st.DrawFn, num_tokens: int) -> list[tuple[int, int]]:
    """Chunks that together are a sequence of so many tokens."""
    cuts = sorted(draw(st.sets(st.integers(1, num_tokens - 1), max_size=4)))
    ends = [*cuts, num_tokens - draw(st.integers(0, 3)), *range(num_tokens - 3, num_tokens + 1)]  # decodes at the end
    ends = sorted({end for end in ends if end > 0})
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 2, 80), (2, 2, 16)])
@settings(max_examples=20)
@given(data=st.data(), num_tokens=st.integers(4, 900), num_threads=st.sampled_from((1, 2, 5)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codes", [None, torch.int8, torch.uint8], ids=["", "int8", "e4m3"])
def test_attention_has_the_same_bits_in_any_chunk_batch_and_blocks(
    kind: str,
    codes: torch.dtype | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    data: st.DataObject,
    num_tokens: int,
    num_threads: int,
) -> None:
    dtype = library_of(kind, num_threads).dtype
    heads = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype) * 3
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    num_blocks = -(-num_tokens // BLOCK_TOKENS)

    def attended(threads: int, chunks: list[tuple[int, int]], blocks: list[int], neighbours: int) -> Tensor:
        library = library_of(kind, threads)
        backend = NativeBackend(library, BLOCK_TOKENS, num_heads, num_kv_heads, head_dim)
        memory = torch.zeros(2, num_kv_heads, NUM_BLOCKS * BLOCK_TOKENS, head_dim, dtype=dtype)
        memory[:, :, : 8 * BLOCK_TOKENS] = 1  # what the neighbours attend to
        memory = coded_memory(memory, codes)
        rows = []
        for start, end in chunks:
            spans = [TokenSpan(blocks, start, end), *(TokenSpan([number], 7, 8) for number in range(neighbours))]
            queries, keys, values = (
                torch.cat((own[start:end], own[start : start + 1].expand(neighbours, -1, -1))) for own in (q, k, v)
            )
            batch = backend.step(spans)
            rows.append(batch.attend(queries, keys, values, memory, AttentionRule(head_dim**-0.5))[: end - start])
        return torch.cat(rows)

    whole = attended(1, [(0, num_tokens)], list(range(8, 8 + num_blocks)), 0)
    scattered = data.draw(st.permutations(range(8, NUM_BLOCKS)))[:num_blocks]
    got = attended(num_threads, data.draw(ways(num_tokens)), scattered, data.draw(st.integers(0, 8)))
    assert torch.equal(got, whole)


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
def test_rows_are_rounded_as_by_torch(library: NativeLibrary, codes: torch.dtype) -> None:
    """Numbers of very unlike sizes in a row, so that codes of all exponents occur, and rows of any size."""
    num_tokens, head_dim = 400, 128
    powers = random(2, num_tokens, 1, head_dim, dtype=torch.float32) * 4
    sizes = torch.linspace(-126, 120, num_tokens).view(1, num_tokens, 1, 1)
    numbers = random(2, num_tokens, 1, head_dim, dtype=torch.float32, seed=1) * torch.exp2(
        (powers + sizes).clamp(max=124)
    )
    numbers[0, 7, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    numbers[1, 8] = 0
    k, v = numbers.to(library.dtype)
    memory = torch.zeros(2, 1, NUM_BLOCKS * BLOCK_TOKENS, head_dim + 2, dtype=codes)
    batch = NativeBackend(library, BLOCK_TOKENS, 1, 1, head_dim).step([TokenSpan(range(NUM_BLOCKS), 0, num_tokens)])
    batch.attend(torch.zeros_like(k), k, v, memory, AttentionRule(1.0))
    assert torch.equal(rows_at(memory, slice(num_tokens)), round_rows(torch.stack((k, v)).transpose(1, 2), codes))


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
def test_every_code_is_the_number_that_torch_reads(library: NativeLibrary, codes: torch.dtype) -> None:
    """A token that sees one key gets its value: codes whose scale is 1."""
    rows = torch.arange(256, dtype=torch.uint8).view(2, 128)
    rows[:, 127] = 0 if codes is torch.uint8 else rows[:, 127]  # e4m3's NaN
    ones = torch.ones(2, 1, dtype=torch.bfloat16).view(torch.uint8)
    memory = torch.zeros(2, 1, NUM_BLOCKS * BLOCK_TOKENS, 130, dtype=codes)
    put_rows(memory[1, 0], slice(0, 2 * BLOCK_TOKENS, BLOCK_TOKENS), torch.cat((rows, ones), dim=1).view(codes))
    stored = memory.clone()
    backend = NativeBackend(library, BLOCK_TOKENS, 1, 1, 128)
    nothing = torch.zeros(1, 1, 128, dtype=library.dtype)
    for at, block in enumerate((0, 1)):
        memory.copy_(stored)
        # A new token behind the one that is read: its key is as far below as scores go, and it is not seen.
        keys = torch.full_like(nothing, -1e30)
        got = backend.step([TokenSpan((block,), 1, 2)]).attend(nothing + 1, keys, nothing, memory, AttentionRule(1.0))
        expected = rows[at].view(CODES[codes]).float()
        assert torch.equal(got[0].float(), expected)


@pytest.mark.parametrize("num_new", [1, 20])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_a_broken_key_is_not_hidden(library: NativeLibrary, num_new: int, what: float) -> None:
    dtype, num_tokens = library.dtype, 300
    q, k, v = (random(num_new, 1, 16, dtype=dtype, seed=seed) for seed in range(3))
    memory = random(2, 1, NUM_BLOCKS * BLOCK_TOKENS, 16, dtype=dtype, seed=3)
    memory[0, 0, 7] = what
    batch = NativeBackend(library, BLOCK_TOKENS, 1, 1, 16).step(
        [TokenSpan(range(19), num_tokens - num_new, num_tokens)]
    )
    assert batch.attend(q.abs(), k, v, memory, AttentionRule(0.25)).isnan().all()


def seen_slots(drawn: list[TokenSpan]) -> Tensor:
    """[num_slots] bool: where a token of some sequence lies."""
    seen = torch.zeros(NUM_BLOCKS * BLOCK_TOKENS, dtype=torch.bool)
    for blocks, _, end in drawn:
        for position in range(end):
            seen[blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS] = True
    return seen


@pytest.mark.parametrize("size", [1, 16, 100, 576])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_rms_norm_with_and_without_a_residual(library: NativeLibrary, num_rows: int, size: int) -> None:
    dtype = library.dtype
    x, added, residual = (random(num_rows, size, dtype=of, seed=1) for of in (dtype, torch.float32, torch.float32))
    weight = random(size, dtype=dtype, seed=3)
    total = added + residual
    plain = library.rms_norm(x, weight, 1e-5)
    got = library.add_rms_norm(added, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    for out, of in ((plain, x), (got, total)):
        expected = functional.rms_norm(of.float(), (size,), weight.float(), 1e-5).to(dtype)
        torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rms_norm_of_heads_that_are_a_view(library: NativeLibrary) -> None:
    dtype = library.dtype
    heads = random(5, 6, 64, dtype=dtype)[:, 1:4]
    weight = random(64, dtype=dtype, seed=3)
    expected = functional.rms_norm(heads, (64,), weight, 1e-5)
    torch.testing.assert_close(
        library.rms_norm(heads, weight, 1e-5), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("size", [1, 100, 1536])
def test_silu_mul_also_of_large_numbers(library: NativeLibrary, size: int) -> None:
    dtype = library.dtype
    gate_up = random(40, 2 * size, dtype=dtype) * 60
    gate, up = gate_up.chunk(2, dim=-1)
    expected = functional.silu(gate.float()) * up.float()
    got = library.silu_mul(gate_up).float()
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rotation_in_place_of_some_heads(library: NativeLibrary, head_dim: int) -> None:
    dtype = library.dtype
    heads = random(40, 7, head_dim, dtype=dtype)
    positions = torch.arange(40).flip(0) * 3
    angles = torch.rand(120, head_dim // 2, generator=torch.Generator().manual_seed(1)) * 7
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    table = torch.cat((cos, cos), 1)[positions].unsqueeze(1), torch.cat((-sin, sin), 1)[positions].unsqueeze(1)
    expected = heads.clone()
    expected[:, :5] = rotate(heads[:, :5], *table)
    library.rotate(heads[:, :5], cos, sin, positions)
    torch.testing.assert_close(heads, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("num_columns", "num_inputs"), [(960, 576), (49, 2050), (576, 1536)])
def test_a_packed_weight_gives_a_row_the_same_bits_in_any_batch(
    library: NativeLibrary, num_columns: int, num_inputs: int
) -> None:
    dtype = library.dtype
    multiply = library.pack_weight(random(num_columns, num_inputs, dtype=dtype))
    assert multiply is not None
    x = random(1100, num_inputs, dtype=dtype, seed=1)
    whole = multiply(x, None)
    for num_rows in (*range(1, 18), 97, 128, 500):
        for start in (0, 1, 130):
            assert torch.equal(multiply(x[start : start + num_rows], None), whole[start : start + num_rows]), num_rows


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 31, 96, 130])
@pytest.mark.parametrize(("num_columns", "num_inputs"), [(960, 576), (30, 18), (65, 2050), (8, 7)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_packed_weight_multiplies(
    library: NativeLibrary, num_rows: int, num_columns: int, num_inputs: int, with_bias: bool
) -> None:
    dtype = library.dtype
    weight = random(num_columns, num_inputs, dtype=dtype) / num_inputs**0.5
    x = random(num_rows, num_inputs, dtype=dtype, seed=1)
    bias = random(num_columns, dtype=dtype, seed=2) if with_bias else None
    multiply = library.pack_weight(weight)
    if multiply is None:  # an odd number of inputs, where oneDNN has nothing for bfloat16 either
        assert (num_inputs % 2, dtype) == (1, torch.bfloat16)
        return
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(multiply(x, bias).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if not isinstance(multiply, KeepsSums):  # oneDNN's
        return
    whole = multiply.sums(x, bias)
    torch.testing.assert_close(whole, expected, atol=TOLERANCE[torch.float32], rtol=TOLERANCE[torch.float32])
    assert torch.equal(whole.to(dtype), multiply(x, bias))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 20), (1, 1, 272), (193, 1, 64)])
def test_heads_that_do_not_fit_are_refused_by_name(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    library = NativeLibrary(compiled(default_cache_dir()), torch.float32, 2)
    with pytest.raises(Incompatible, match="head size"):
        NativeBackend(library, BLOCK_TOKENS, num_heads, num_kv_heads, head_dim)


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(Incompatible, match="float16"):
        NativeLibrary(compiled(default_cache_dir()), torch.float16, 2)


@pytest.mark.parametrize("size", [18, 36, 63])  # a whole vector, and some numbers behind it
def test_a_norm_has_the_same_bits_whether_something_is_added_or_was_before(library: NativeLibrary, size: int) -> None:
    x, residual = random(200, size, dtype=torch.float32), random(200, size, dtype=torch.float32, seed=1)
    weight, out = random(size, dtype=library.dtype), torch.empty(200, size, dtype=library.dtype)
    expected = library.add_rms_norm(x, residual, weight, 1e-6)
    pointers = (tensor.data_ptr() for tensor in (residual, weight, out))
    library._add_rms_norm(0, *pointers, 200, size, 1e-6, 1)
    assert torch.equal(out, expected)
