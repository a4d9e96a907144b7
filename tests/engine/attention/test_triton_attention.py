"""The triton back end stores and attends as the plain reference does, decodes and prefills in one step."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from halfmoon.engine.attention import attention_table
from halfmoon.engine.attention.attention import SdpaBackend, attend_reference
from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.attention.attention_table import MixedAttention, fused_from
from halfmoon.errors import Incompatible

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from tests.engine.kernels.conftest import HAS_GPU  # isort: skip  (chooses the interpreter where there is no GPU)
from halfmoon.engine.attention import triton_attention  # isort: skip
from halfmoon.engine.attention.triton_attention import TritonBackend  # isort: skip
from halfmoon.engine.kernels.paged_kv import PagedKV  # isort: skip
from tests.engine.coded_memory import coded_memory

BLOCK_TOKENS = 8
NUM_BLOCKS = 40
DEVICE = "cuda" if HAS_GPU else "cpu"
CODES = [None, torch.int8, torch.uint8]


def backend(num_programs: int = 2, context_tokens: int = 128, mixed: MixedAttention = "auto") -> TritonBackend:
    return TritonBackend(BLOCK_TOKENS, num_programs, context_tokens, DEVICE, mixed)


def spans(*ranges: tuple[int, int]) -> list[TokenSpan]:
    """Sequences whose tokens `start`..`end` run; their blocks lie scattered, and each has one more than it needs."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    needed = [-(-end // BLOCK_TOKENS) + 1 for _, end in ranges]
    ends = [0, *torch.tensor(needed).cumsum(0).tolist()]
    return [TokenSpan(free[a:b], *one) for (a, b), one in zip(pairwise(ends), ranges, strict=True)]


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 1), (20, 21), (63, 64)],
        [(0, 20)],
        [(40, 41), (7, 8), (0, 9), (16, 30)],
        [(5, 6), (0, 4), (9, 10), (3, 5)],  # a chunk of one token among the prefills
    ],
    ids=["decodes", "prefill", "both", "one-token chunk"],
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("mixed", ["fused", "apart"])
def test_a_step_is_that_of_the_reference(
    ranges: list[tuple[int, int]], num_heads: int, num_kv_heads: int, codes: torch.dtype | None, mixed: MixedAttention
) -> None:
    rows = sum(end - start for start, end in ranges)
    generator = torch.Generator().manual_seed(rows)
    fused = torch.randn(rows, num_heads + 2 * num_kv_heads, 16, generator=generator).to(DEVICE)
    q, k, v = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)  # views, as a model hands them over
    memory = torch.randn(2, num_kv_heads, NUM_BLOCKS * BLOCK_TOKENS, 16, generator=generator).to(DEVICE)
    memory = coded_memory(memory, codes)
    memories = [memory.clone(), memory.clone()]
    batch = SdpaBackend(BLOCK_TOKENS, DEVICE).step(spans(*ranges))
    expected = attend_reference(q, k, v, memories[0], batch, AttentionRule(0.25))
    got = backend(num_kv_heads, mixed=mixed).step(spans(*ranges)).attend(q, k, v, memories[1], AttentionRule(0.25))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(memories[0], memories[1])


@pytest.mark.parametrize(
    "ranges", [[(0, 1), (20, 21)], [(0, 20)], [(40, 41), (7, 8), (0, 9), (16, 30)]], ids=["decodes", "prefill", "both"]
)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_latents_are_attended_as_by_the_reference(ranges: list[tuple[int, int]], codes: torch.dtype | None) -> None:
    rows = sum(end - start for start, end in ranges)
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, 4, 64, generator=generator).to(DEVICE)
    k, v = torch.randn(rows, 1, 64, generator=generator).to(DEVICE).chunk(2, dim=2)
    memory = torch.randn(2, 1, NUM_BLOCKS * BLOCK_TOKENS, 32, generator=generator).to(DEVICE)
    memory = coded_memory(memory, codes)
    memories, rule = [memory.clone(), memory.clone()], AttentionRule(0.25, latent_size=48)
    expected = attend_reference(q, k, v, memories[0], SdpaBackend(BLOCK_TOKENS, DEVICE).step(spans(*ranges)), rule)
    got = backend(1).step(spans(*ranges)).attend(q, k, v, memories[1], rule)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(memories[0], memories[1])


def test_a_step_holds_what_its_kernels_read_and_no_more() -> None:
    both = backend().step(spans((40, 41), (7, 8), (0, 9), (16, 30)))
    assert (both.num_decodes, both.max_new_tokens, both.slot_mapping.numel()) == (2, 14, 25)
    assert both.cu_seqlens is not None
    assert both.cu_seqlens.tolist() == [0, 9, 23]
    assert both.decodes is not None
    assert both.prefills is not None
    assert (both.decodes.context_lens.tolist(), both.prefills.context_lens.tolist()) == ([41, 8], [9, 30])
    assert (both.decodes.block_table.shape, both.prefills.block_table.shape) == ((2, 6), (2, 4))
    assert backend().step(spans((40, 41), (7, 8))).prefills is None
    assert backend().step(spans((0, 3))).decodes is None


def test_the_memory_of_a_layer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each step; another layer's, or a part of a layer that begins where it does, is another memory."""
    checked: list[torch.Size] = []

    def of_layer(layer_kv: torch.Tensor, block_tokens: int) -> PagedKV:
        checked.append(layer_kv.shape)
        return PagedKV.of_layer(layer_kv, block_tokens)

    monkeypatch.setattr(triton_attention, "PagedKV", SimpleNamespace(of_layer=of_layer))
    whole = torch.zeros(3, 2, 2, NUM_BLOCKS * BLOCK_TOKENS, 16, device=DEVICE)
    q, kv = torch.ones(1, 2, 16, device=DEVICE), torch.ones(1, 2, 16, device=DEVICE)
    attention = backend()
    for _ in range(3):
        step = attention.step([TokenSpan([7], 0, 1)])
        for layer_kv in whole.unbind(0):
            step.attend(q, kv, kv, layer_kv, AttentionRule(0.25))
    assert checked == [whole.shape[1:]] * 3
    half = whole[0, :, :, : 20 * BLOCK_TOKENS]
    attention.step([TokenSpan([7], 0, 1)]).attend(q, 2 * kv, kv, half, AttentionRule(0.25))
    assert checked[3:] == [half.shape]
    assert whole[0, 0, :, 7 * BLOCK_TOKENS].eq(2).all()
    with pytest.raises(ValueError, match="whole blocks"):
        step.attend(q, kv, kv, whole[0, :, :, :-1], AttentionRule(0.25))


def test_a_step_is_fused_as_the_setting_or_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    step = spans((40, 41), (7, 8), (0, 9))
    assert [backend(mixed=mixed).step(step).is_fused for mixed in ("fused", "apart", "auto")] == [True, False, False]
    monkeypatch.setattr(attention_table, "FUSED_FROM", {(9, 0): 49})
    assert [fused_from("auto", capability) for capability in ((9, 0), (8, 0), None)] == [49, None, None]
    assert (fused_from("fused", (8, 0)), fused_from("apart", (9, 0))) == (0, None)
    monkeypatch.setattr(triton_attention, "fused_from", lambda *_: fused_from("auto", (9, 0)))
    assert backend().step(step).is_fused  # 49 tokens of decodes
    assert not backend().step(spans((40, 41), (6, 7), (0, 9))).is_fused


def test_splits_depend_on_the_size_of_the_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = backend(num_programs=1, context_tokens=65536)
    monkeypatch.setattr(wide, "_num_sms", 64)
    eager = [wide.step(spans(*[(start, start + 1)] * 3)).num_splits for start in (0, 30)]
    ids = torch.zeros(4, dtype=torch.int32)
    captured = wide.decode_step(ids.long(), ids.view(4, 1), ids).num_splits
    assert eager == [captured, captured] == [64, 64]


@pytest.mark.skipif(HAS_GPU, reason="is about a machine without")
def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Incompatible, match="TRITON_INTERPRET=1"):
        backend()
