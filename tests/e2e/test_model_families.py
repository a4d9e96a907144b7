"""Gateway -> prefill -> decode gives transformers' tokens with models of each family, random and tiny."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from tests.e2e.small_model import SIZES, small_model
from tests.e2e.system import running_system

pytestmark = pytest.mark.e2e

MAX_TOKENS = 12
OPTIONS = ("--dtype", "float32", "--quantization", "none", "--conditional-disaggregation", "off")
FAMILIES: dict[str, Callable[[], Any]] = {
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=50),
    "phi3": lambda: Phi3Config(**SIZES),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=40,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=20,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=50, layer_types=["sliding_attention", "full_attention"]
    ),
}


def prompts() -> list[list[int]]:
    """Some shorter than a block, than a chunk and than a window, some longer."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 49152, (length,), generator=generator).tolist() for length in (5, 64, 150, 700)]


def greedy(path: Path, prompt: Sequence[int]) -> list[int]:
    """transformers' tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False
        )
    return [int(token) for token in out[0, len(prompt) :]]


async def completion(session: aiohttp.ClientSession, prompt: Sequence[int]) -> list[int]:
    body = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "min_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = small_model(tmp_path / "small", FAMILIES[family]())
    asked = prompts()
    expected = [greedy(path, prompt) for prompt in asked]
    async with (
        running_system(tmp_path / "state", "--model", str(path), *OPTIONS) as system,
        aiohttp.ClientSession(system.url) as session,
    ):
        for prompt, tokens in zip(asked, expected, strict=True):
            assert await completion(session, prompt) == tokens
        assert await asyncio.gather(*(completion(session, prompt) for prompt in asked)) == expected


@pytest.mark.parametrize("family", ["mistral", "deepseek-v3"])
async def test_a_prefill_worker_of_sequence_ranks_gives_them_too(family: str, tmp_path: Path) -> None:
    """Prompts of more than 100 tokens are shared by three ranks, and handed over to a decode worker of one."""
    path = small_model(tmp_path / "small", FAMILIES[family]())
    asked = prompts()
    expected = [greedy(path, prompt) for prompt in asked]
    cut = ("--set", "workers.prefill={sequence_parallel: 3, long_prompt_tokens: 100}")
    async with (
        running_system(tmp_path / "state", "--model", str(path), *OPTIONS, *cut) as system,
        aiohttp.ClientSession(system.url) as session,
    ):
        assert await asyncio.gather(*(completion(session, prompt) for prompt in asked)) == expected
