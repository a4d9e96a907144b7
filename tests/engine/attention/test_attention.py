"""The sdpa back end computes what the plain reference computes, however the keys lie in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.attention.attention import AttentionBatch, Segment, attend_reference, attend_sdpa
from halfmoon.engine.attention.attention_backend import AttentionRule
from halfmoon.engine.kv_memory.kv_arena import slot_runs

BLOCK_TOKENS = 4
NUM_BLOCKS = 32


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[int], int, int]]:
    """Sequences as (blocks, computed tokens, new tokens); no block belongs to two."""
    free = draw(st.permutations(range(NUM_BLOCKS)))
    if draw(st.booleans()):
        free = list(range(NUM_BLOCKS))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        past, new = draw(st.integers(0, 20)), draw(st.integers(1, 10))
        num_blocks = -(-(past + new) // BLOCK_TOKENS)
        blocks, free = list(free[:num_blocks]), free[num_blocks:]
        sequences.append((blocks, past, new))
    return sequences


def layout(sequences: list[tuple[list[int], int, int]]) -> AttentionBatch:
    slots: list[int] = []
    segments = []
    for blocks, past, new in sequences:
        row = len(slots)
        for run in slot_runs(blocks, BLOCK_TOKENS, past, past + new):
            slots += range(*run)
        seen = tuple(slot_runs(blocks, BLOCK_TOKENS, 0, past + 1 if new == 1 else past))
        segments.append(Segment(row, len(slots), seen))
    return AttentionBatch(torch.tensor(slots), tuple(segments))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@settings(max_examples=60)
@given(
    sequences=batches(),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.just(2.0),
    seed=st.integers(0, 1000),
)
def test_sdpa_equals_reference(
    num_heads: int,
    num_kv_heads: int,
    sequences: list[tuple[list[int], int, int]],
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    rule = AttentionRule(0.25, window, softcap)
    generator = torch.Generator().manual_seed(seed)
    batch = layout(sequences)
    rows = batch.slots.numel()
    q = torch.randn(rows, num_heads, 16, generator=generator)
    k = torch.randn(rows, num_kv_heads, 16, generator=generator)
    v = torch.randn(rows, num_kv_heads, 16, generator=generator)
    memory = torch.randn(2, num_kv_heads, NUM_BLOCKS * BLOCK_TOKENS, 16, generator=generator)
    memories = [memory.clone(), memory.clone()]
    expected = attend_reference(q, k, v, memories[0], batch, rule)
    got = attend_sdpa(q, k, v, memories[1], batch, rule)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(memories[0], memories[1])
    torch.testing.assert_close(memories[1][0][:, batch.slots].transpose(0, 1), k)


def test_reference_is_torch_attention() -> None:
    q, k, v = (torch.randn(12, 3, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    batch = AttentionBatch(torch.arange(12), (Segment(0, 12, ()),))
    got = attend_reference(q, k, v, torch.zeros(2, 3, 12, 16), batch, AttentionRule(0.25))
    torch.testing.assert_close(got, expected.transpose(0, 1).reshape(12, -1))


@pytest.mark.parametrize("window", [1, 5, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_caps_are_those_of_a_mask(window: int, softcap: float | None) -> None:
    q, k, v = (torch.randn(12, 3, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.25
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distances = torch.arange(12)[:, None] - torch.arange(12)
    scores = scores.masked_fill((distances < 0) | (distances >= window), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(12, -1)
    memory, outs = torch.zeros(2, 3, 12, 16), []
    rule = AttentionRule(0.25, window, softcap)
    for segment in (Segment(0, 7, ()), Segment(0, 4, ((0, 7),)), Segment(0, 1, ((0, 12),))):
        end = min(segment.num_tokens, 12)
        rows = slice(end - segment.row_end, end)
        batch = AttentionBatch(torch.arange(12)[rows], (segment,))
        outs.append(attend_sdpa(q[rows], k[rows], v[rows], memory, batch, rule))
    torch.testing.assert_close(torch.cat(outs), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_parts_are_merged_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 16, generator=generator) for _ in range(3))
    memory = torch.randn(2, 2, 64, 16, generator=generator)
    batch = AttentionBatch(torch.tensor([63]), (Segment(0, 1, ((0, 20), (30, 50), (60, 64))),))
    expected = attend_reference(q, k, v, memory.clone(), batch, AttentionRule(0.25))
    got = attend_sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), memory.bfloat16(), batch, AttentionRule(0.25))
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
