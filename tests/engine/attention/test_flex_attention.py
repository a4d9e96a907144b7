"""The flex back end stores and attends as the plain reference does: windows, caps, groups, shared and dirty blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.engine.attention import flex_attention
from halfmoon.engine.attention.attention import SdpaBackend, attend_reference
from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.attention.flex_attention import FlexBackend, can_compile
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from tests.engine.coded_memory import coded_memory

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BLOCK_TOKENS = 16
NUM_BLOCKS = 60
RULES = [
    AttentionRule(0.25),
    AttentionRule(0.25, window=11),
    AttentionRule(0.25, softcap=2.0),
    AttentionRule(0.25, window=11, softcap=2.0),
]
DECODES, PREFILL, BOTH = [(0, 1), (20, 21), (63, 64)], [(0, 20)], [(40, 41), (7, 8), (0, 9), (16, 90), (3, 4)]


def spans(ranges: list[tuple[int, int]]) -> list[TokenSpan]:
    """Sequences whose tokens `start`..`end` run; their blocks lie scattered, and each has one more than it needs."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    needed = [-(-end // BLOCK_TOKENS) + 1 for _, end in ranges]
    ends = [0, *torch.tensor(needed).cumsum(0).tolist()]
    return [TokenSpan(free[a:b], *one) for (a, b), one in zip(pairwise(ends), ranges, strict=True)]


def check(backend: FlexBackend, sequences: list[TokenSpan], rule: AttentionRule, num_heads: int, heads: int) -> None:
    rows = sum(end - start for _, start, end in sequences)
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, num_heads, 16, generator=generator)
    k, v = torch.randn(2, rows, heads, 16, generator=generator)
    memory = torch.full((2, heads, NUM_BLOCKS * BLOCK_TOKENS, 16), float("nan"))
    for blocks, start, _ in sequences:  # what was there before; everything else is garbage
        past = [blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(start)]
        memory[:, :, past] = torch.randn(2, heads, 1, 16, generator=generator) + torch.randn(
            2, heads, len(past), 16, generator=generator
        )
    memories = [memory.clone(), memory.clone()]
    batch = SdpaBackend(BLOCK_TOKENS, "cpu").step(sequences)
    expected = attend_reference(q, k, v, memories[0], batch, rule)
    with torch.inference_mode():
        got = backend.step(sequences).attend(q, k, v, memories[1], rule)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    kept = memories[0].isfinite()
    assert torch.equal(memories[0][kept], memories[1][kept])


@pytest.mark.parametrize("ranges", [DECODES, PREFILL, BOTH], ids=["decodes", "prefill", "both"])
@pytest.mark.parametrize("rule", RULES, ids=["full", "window", "cap", "window and cap"])
@pytest.mark.parametrize(("num_heads", "heads"), [(4, 4), (6, 2)])
def test_a_step_is_that_of_the_reference(
    ranges: list[tuple[int, int]], rule: AttentionRule, num_heads: int, heads: int
) -> None:
    check(FlexBackend(BLOCK_TOKENS, "cpu", compiles=False), spans(ranges), rule, num_heads, heads)


def test_sequences_share_blocks() -> None:
    one, other = spans([(16, 17), (16, 40)])
    shared = TokenSpan([*one.blocks[:1], *other.blocks[1:]], other.start, other.end)
    check(FlexBackend(BLOCK_TOKENS, "cpu", compiles=False), [one, shared], RULES[0], 4, 2)


@pytest.mark.parametrize("rule", [AttentionRule(0.25), AttentionRule(0.25, latent_size=24)], ids=["codes", "latents"])
def test_the_reference_computes_the_rest(rule: AttentionRule) -> None:
    heads, width = (1, 32) if rule.latent_size else (2, 16)
    q, k, v = torch.randn(20, 4, width), torch.randn(20, heads, 16), torch.randn(20, heads, 16)
    memory = torch.randn(2, heads, NUM_BLOCKS * BLOCK_TOKENS, 16)
    memory = coded_memory(memory, None if rule.latent_size else torch.uint8)
    batch = SdpaBackend(BLOCK_TOKENS, "cpu").step(spans(PREFILL))
    expected = attend_reference(q, k, v, memory.clone(), batch, rule)
    step = FlexBackend(BLOCK_TOKENS, "cpu", compiles=False).step(spans(PREFILL))
    assert torch.equal(step.attend(q, k, v, memory, rule), expected)


@pytest.mark.parametrize("model", ["gemma2", "llama"])
def test_an_engine_has_the_tokens_of_sdpa(
    model: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "can_compile", lambda device, block_tokens: False)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    answers: list[list[Any]] = []
    for attention in ("sdpa", "flex"):
        engine = make_engine(model, attention=attention, max_batch_tokens=24, chunk_tokens=7)
        for name, length in (("a", 30), ("b", 3)):
            engine.add(EngineRequest(name, tuple(range(3, 3 + length)), sampling))
        outputs: list[Any] = []
        while engine.has_work():
            outputs += engine.step().outputs
        answers.append(sorted((one.request_id, one.position, one.token_id) for one in outputs))
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_compile("cpu", BLOCK_TOKENS), reason="needs a C++ compiler and AVX2")
def test_compiled_it_computes_the_same_for_steps_of_any_size(tmp_path: Path) -> None:
    """In a process of its own: others here have Triton's interpreter, and no compiler's warnings."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[3]), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    """With and without a cap, for single rows and chunks, however many sequences and however long."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    backend = FlexBackend(BLOCK_TOKENS, "cpu", compiles=True)
    for ranges in (BOTH, DECODES, PREFILL, [(30, 31)], [(0, 40), (0, 2)]):
        for rule in (RULES[0], RULES[3]):
            check(backend, spans(ranges), rule, 6, 2)


if __name__ == "__main__":
    main()
