"""One system in float32 for all end-to-end tests, and the reference implementation beside it."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import aiohttp
import pytest
import pytest_asyncio

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from tests.e2e.system import System, running_system


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """1 prefill and 1 decode worker, float32, and a hand-over for every request: what the golden test compares.

    HALFMOON_E2E_OPTIONS has further options of `halfmoon up`, such as those of another engine.
    """
    further = shlex.split(os.environ.get("HALFMOON_E2E_OPTIONS", ""))
    numbers = ("--dtype", "float32", "--quantization", "none")
    options = (*numbers, "--conditional-disaggregation", "off", *further)
    start_s = 600.0 if further else 120.0
    async with running_system(tmp_path_factory.mktemp("state"), *options, start_timeout_s=start_s) as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http(system: System) -> AsyncIterator[aiohttp.ClientSession]:
    """A session of HTTP requests to the system."""
    async with aiohttp.ClientSession(system.url) as session:
        yield session


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """The demo model."""
    return prepare_checkpoint("demo")


class Reference(Protocol):
    """Greedy tokens of `transformers` for a prompt, on the same float32 weights."""

    def __call__(self, prompt: str, max_tokens: int, guess: Sequence[int] = ()) -> list[int]:
        """Returns at most `max_tokens`, which end with the end of the text. A right `guess` at them saves decoding."""
        ...


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The reference implementation; each prompt is computed once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = prepare_checkpoint("demo", as_numbers=True).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    known: dict[tuple[str, int], list[int]] = {}

    def is_right(prompt_ids: list[int], max_tokens: int, guess: list[int]) -> bool:
        end = model.generation_config.eos_token_id
        if not guess or end in guess[:-1] or not (len(guess) == max_tokens or guess[-1] == end):
            return False
        logits = model(torch.tensor([prompt_ids + guess[:-1]]), logits_to_keep=len(guess)).logits
        return bool(logits[0].argmax(dim=-1).tolist() == guess)

    def generate(prompt: str, max_tokens: int, guess: Sequence[int] = ()) -> list[int]:
        if (prompt, max_tokens) not in known:
            inputs, tokens = tokenizer(prompt, return_tensors="pt"), list(guess)
            prompt_ids = inputs["input_ids"][0].tolist()
            with torch.inference_mode():
                if not is_right(prompt_ids, max_tokens, tokens):
                    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
                    tokens = output[0, len(prompt_ids) :].tolist()
            known[prompt, max_tokens] = tokens
        return known[prompt, max_tokens]

    return generate
