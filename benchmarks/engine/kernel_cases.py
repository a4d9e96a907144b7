"""Inputs of the timed Triton kernels at a model's shapes, and the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from halfmoon.engine.kv_memory.quantised_rows import CODES, is_quantised, put_rows, round_rows

if TYPE_CHECKING:
    from halfmoon.engine.kernels.paged_kv import PagedKV


BLOCK_TOKENS = 64
SCALE_ITEMS = 2  # of a row of codes


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of one model; the defaults are Llama-3.1-8B's."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Has `flops` and `peer`, other code for the job, if bound by arithmetic rather than memory.
    """

    kernel: str
    shape: str
    num_bytes: int
    run: Callable[[], Any]
    flops: float = 0.0
    peer: Callable[[], Any] | None = None
    peer_name: str = "torch's attention"


@dataclass(frozen=True, slots=True)
class Sequences:
    """K and V of equally long sequences in scattered blocks."""

    kv: PagedKV
    block_table: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32


def make_sequences(shapes: Shapes, num_seqs: int, context: int, kv_dtype: torch.dtype) -> Sequences:
    from halfmoon.engine.kernels.paged_kv import PagedKV

    per_seq = -(-context // BLOCK_TOKENS)
    num_slots, row_items = num_seqs * per_seq * BLOCK_TOKENS, shapes.head_dim + SCALE_ITEMS * is_quantised(kv_dtype)
    layer = torch.empty(2, shapes.num_kv_heads, num_slots, row_items, dtype=kv_dtype, device=shapes.device)
    for head in layer.flatten(0, 1):  # one at a time: the random numbers are wider than the stored values
        numbers = torch.randn(num_slots, shapes.head_dim, device=shapes.device)
        put_rows(head, slice(None), round_rows(numbers, kv_dtype) if is_quantised(kv_dtype) else numbers)
    table = torch.randperm(num_seqs * per_seq, device=shapes.device).int().view(num_seqs, per_seq)
    lens = torch.full((num_seqs,), context, dtype=torch.int32, device=shapes.device)
    return Sequences(PagedKV.of_layer(layer, BLOCK_TOKENS), table, lens)


def kv_bytes(kv: PagedKV, num_tokens: int) -> int:
    """Bytes of K and V of `num_tokens` tokens in one layer."""
    row_bytes = kv.k.shape[2] * kv.k.element_size() + SCALE_ITEMS * (kv.k_scales is not None)
    return 2 * num_tokens * kv.k.shape[0] * row_bytes


def kv_name(kv_dtype: torch.dtype) -> str:
    """Of memory: where it has codes, theirs."""
    return str(CODES.get(kv_dtype, kv_dtype)).removeprefix("torch.")


def decode_case(shapes: Shapes, num_seqs: int, context: int, kv_dtype: torch.dtype, num_sms: int) -> Case:
    from halfmoon.engine.kernels.decode_attention import PROGRAMS_PER_SM, decode_attention
    from halfmoon.engine.kernels.key_splits import choose_num_splits

    seqs = make_sequences(shapes, num_seqs, context, kv_dtype)
    q = shapes.randn(num_seqs, shapes.num_q_heads, shapes.head_dim)
    num_splits = choose_num_splits(num_seqs, shapes.num_kv_heads, context, num_sms, PROGRAMS_PER_SM)
    moved = kv_bytes(seqs.kv, num_seqs * context) + 2 * q.nbytes + seqs.block_table.nbytes
    scale = shapes.head_dim**-0.5
    return Case(
        "decode_attention",
        f"batch {num_seqs}, context {context}, {kv_name(kv_dtype)}, {num_splits} splits",
        moved,
        lambda: decode_attention(q, seqs.kv, seqs.block_table, seqs.context_lens, scale, num_splits),
    )


def latent_case(device: str, num_seqs: int, context: int, num_sms: int) -> Case:
    """A decode of DeepSeek-V3's attention: 128 heads, rows of 512 + 64 numbers."""
    from halfmoon.engine.kernels.key_splits import choose_num_splits
    from halfmoon.engine.kernels.latent_attention import PROGRAMS_PER_SM, latent_attention, row_tile

    seqs = make_sequences(Shapes(num_kv_heads=1, head_dim=288, device=device), num_seqs, context, torch.bfloat16)
    q = torch.randn(num_seqs, 128, 576, dtype=torch.bfloat16, device=device)
    num_splits = choose_num_splits(num_seqs, 128 // row_tile(128, torch.bfloat16), context, num_sms, PROGRAMS_PER_SM)
    return Case(
        "latent_attention",
        f"batch {num_seqs}, context {context}, {num_splits} splits",
        kv_bytes(seqs.kv, num_seqs * context) + q.nbytes * 17 // 9 + seqs.block_table.nbytes,
        lambda: latent_attention(q, seqs.kv, seqs.block_table, seqs.context_lens, 576**-0.5, 512, num_splits),
    )


def prefill_case(shapes: Shapes, num_cached: int, num_new: int) -> Case:
    from halfmoon.engine.kernels.prefill_attention import prefill_attention

    seqs = make_sequences(shapes, 1, num_cached + num_new, shapes.dtype)
    q = shapes.randn(num_new, shapes.num_q_heads, shapes.head_dim)
    starts = torch.tensor([0, num_new], dtype=torch.int32, device=shapes.device)
    scale = shapes.head_dim**-0.5
    context = num_cached + num_new
    dense_q = q.transpose(0, 1).unsqueeze(0)  # [1, num_q_heads, num_new, head_dim]
    k, v = (shapes.randn(1, shapes.num_kv_heads, context, shapes.head_dim) for _ in range(2))

    def peer() -> Tensor:
        if num_cached == 0:
            return functional.scaled_dot_product_attention(dense_q, k, v, is_causal=True, enable_gqa=True)
        mask = causal_lower_right(num_new, context)
        return functional.scaled_dot_product_attention(dense_q, k, v, attn_mask=mask, enable_gqa=True)

    return Case(
        "prefill_attention",
        f"{num_new} new after {num_cached} cached",
        kv_bytes(seqs.kv, context) + 2 * q.nbytes,
        lambda: prefill_attention(q, seqs.kv, seqs.block_table, starts, seqs.context_lens, num_new, scale),
        flops=4.0 * shapes.num_q_heads * shapes.head_dim * num_new * (num_cached + (num_new + 1) / 2),
        peer=peer,
    )


def mixed_case(shapes: Shapes, num_decodes: int, context: int, num_cached: int, num_new: int, num_sms: int) -> Case:
    """A chunk of a prompt beside decodes."""
    from halfmoon.engine.kernels.decode_attention import PROGRAMS_PER_SM, decode_attention
    from halfmoon.engine.kernels.key_splits import choose_num_splits
    from halfmoon.engine.kernels.mixed_attention import Decodes, Prefills, mixed_attention
    from halfmoon.engine.kernels.prefill_attention import prefill_attention

    longest = max(context, num_cached + num_new)
    seqs = make_sequences(shapes, num_decodes + 1, longest, shapes.dtype)
    tables = [seqs.block_table[:num_decodes].clone(), seqs.block_table[num_decodes:].clone()]
    lens = [torch.full((n,), size, dtype=torch.int32, device=shapes.device)
            for n, size in ((num_decodes, context), (1, num_cached + num_new))]  # fmt: skip
    starts = torch.tensor([0, num_new], dtype=torch.int32, device=shapes.device)
    q = shapes.randn(num_decodes + num_new, shapes.num_q_heads, shapes.head_dim)
    num_splits = choose_num_splits(num_decodes, shapes.num_kv_heads, context, num_sms, PROGRAMS_PER_SM)
    scale = shapes.head_dim**-0.5
    decodes, prefills = Decodes(tables[0], lens[0], num_splits), Prefills(tables[1], starts, lens[1], num_new)

    def apart() -> Tensor:
        first = decode_attention(q[:num_decodes], seqs.kv, tables[0], lens[0], scale, num_splits)
        return torch.cat((first, prefill_attention(q[num_decodes:], seqs.kv, *prefills, scale)))

    pairs = num_decodes * context + num_new * (num_cached + (num_new + 1) / 2)  # queries times keys
    return Case(
        "mixed_attention",
        f"{num_decodes} at {context}, {num_new} new after {num_cached} cached",
        kv_bytes(seqs.kv, num_decodes * context + num_cached + num_new) + 2 * q.nbytes,
        lambda: mixed_attention(q, seqs.kv, decodes, prefills, scale),
        flops=4.0 * shapes.num_q_heads * shapes.head_dim * pairs,
        peer=apart,
        peer_name="two kernels",
    )


def store_case(shapes: Shapes, num_tokens: int, kv_dtype: torch.dtype) -> Case:
    from halfmoon.engine.kernels.kv_write import kv_write

    seqs = make_sequences(shapes, 1, 4 * num_tokens, kv_dtype)
    heads = shapes.num_q_heads + 2 * shapes.num_kv_heads
    qkv = shapes.randn(num_tokens, heads, shapes.head_dim)
    k, v = qkv[:, shapes.num_q_heads :].chunk(2, dim=1)
    blocks = seqs.block_table[0].long()
    positions = torch.arange(num_tokens, device=shapes.device)
    slots = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    moved = 2 * k.numel() * k.element_size() + kv_bytes(seqs.kv, num_tokens) + slots.nbytes
    return Case("kv_write", f"{num_tokens} tokens, {kv_name(kv_dtype)}", moved, lambda: kv_write(k, v, seqs.kv, slots))


def norm_cases(shapes: Shapes, num_tokens: int) -> Iterator[Case]:
    from halfmoon.engine.kernels.rms_norm import add_rms_norm, rms_norm

    x, residual = (shapes.randn(num_tokens, shapes.hidden_size) for _ in range(2))
    weight = shapes.randn(shapes.hidden_size)
    yield Case("rms_norm", f"{num_tokens} tokens", 2 * x.nbytes, lambda: rms_norm(x, weight, 1e-5))
    yield Case("add_rms_norm", f"{num_tokens} tokens", 4 * x.nbytes, lambda: add_rms_norm(x, residual, weight, 1e-5))


def rotary_case(shapes: Shapes, num_tokens: int) -> Case:
    from halfmoon.engine.kernels.rotary import rotary

    qkv = shapes.randn(num_tokens, shapes.num_q_heads + 2 * shapes.num_kv_heads, shapes.head_dim)
    q, k = qkv[:, : shapes.num_q_heads], qkv[:, shapes.num_q_heads : shapes.num_q_heads + shapes.num_kv_heads]
    cos, sin = (torch.rand(num_tokens, shapes.head_dim // 2, device=shapes.device) for _ in range(2))
    positions = torch.arange(num_tokens, device=shapes.device)
    moved = 2 * (q.numel() + k.numel()) * q.element_size() + cos.nbytes + sin.nbytes
    return Case("rotary", f"{num_tokens} tokens", moved, lambda: rotary(q, k, positions, cos, sin))


def silu_mul_case(shapes: Shapes, num_tokens: int) -> Case:
    from halfmoon.engine.kernels.silu_mul import silu_mul

    gate_up = shapes.randn(num_tokens, 2 * shapes.intermediate_size)
    return Case("silu_mul", f"{num_tokens} tokens", gate_up.nbytes * 3 // 2, lambda: silu_mul(gate_up))


def copy_cases(shapes: Shapes, num_tokens: int) -> Iterator[Case]:
    from halfmoon.engine.kernels.block_copy import gather_blocks, scatter_blocks

    num_blocks = 4 * -(-num_tokens // BLOCK_TOKENS)
    size = (shapes.num_layers, 2, shapes.num_kv_heads, num_blocks * BLOCK_TOKENS, shapes.head_dim)
    arena = torch.zeros(size, dtype=shapes.dtype, device=shapes.device)
    ids = torch.randperm(num_blocks, device=shapes.device).int()
    span = (ids, BLOCK_TOKENS)
    buffer = gather_blocks(arena, *span, 0, shapes.num_layers, 0, num_tokens)
    text = f"{num_tokens} tokens, {shapes.num_layers} layers"
    yield Case(
        "gather_blocks",
        text,
        2 * buffer.nbytes,
        lambda: gather_blocks(arena, *span, 0, shapes.num_layers, 0, num_tokens),
    )
    yield Case("scatter_blocks", text, 2 * buffer.nbytes, lambda: scatter_blocks(buffer, arena, *span, 0, 0))


def cases(shapes: Shapes, num_sms: int) -> Iterator[tuple[str, Callable[[], Case | Iterator[Case]]]]:
    """Measurements by kernel file; a case's tensors are created when it is called."""
    for num_seqs in (1, 8, 64):
        for context in (1024, 8192, 32768):
            for kv_dtype in (shapes.dtype, *CODES):
                yield "decode_attention", partial(decode_case, shapes, num_seqs, context, kv_dtype, num_sms)
    for num_seqs in (1, 8, 64):
        for context in (1024, 8192):
            yield "latent_attention", partial(latent_case, shapes.device, num_seqs, context, num_sms)
    for num_cached, num_new in ((0, 512), (0, 2048), (0, 8192), (8192, 512), (8192, 2048), (32768, 2048)):
        yield "prefill_attention", partial(prefill_case, shapes, num_cached, num_new)
    for num_seqs, context in ((8, 1024), (64, 1024), (8, 8192), (64, 8192)):
        for num_cached in (0, 8192):
            yield "mixed_attention", partial(mixed_case, shapes, num_seqs, context, num_cached, 512, num_sms)
    for kv_dtype in (shapes.dtype, *CODES):
        yield "kv_write", partial(store_case, shapes, 8192, kv_dtype)
    for num_tokens in (64, 8192):
        yield "rms_norm", partial(norm_cases, shapes, num_tokens)
        yield "rotary", partial(rotary_case, shapes, num_tokens)
        yield "silu_mul", partial(silu_mul_case, shapes, num_tokens)
    for num_tokens in (64, 1024):
        yield "block_copy", partial(copy_cases, shapes, num_tokens)
