"""The golden test: gateway -> prefill -> decode gives the tokens that transformers gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from tests.e2e.conftest import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

MAX_TOKENS = 24
_STORY = "The moon rose over the quiet harbour, and the fishermen counted their boats one by one before the tide. "
PROMPTS = [
    "Hello",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village between two rivers,",
    "Überraschung: 日本語のテキスト 🙂 und weiter geht es mit",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    "Water boils at 100 degrees Celsius at sea level. " * 8 + "At high altitude,",
    _STORY * 20,
    _STORY * 60 + "In the morning,",
]


async def completion(http: aiohttp.ClientSession, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    async with http.post("/v1/completions", json=body | more) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def check(answer: dict[str, Any], prompt: str, reference: Reference, tokenizer: Tokenizer) -> None:
    (choice,) = answer["choices"]
    expected = reference(prompt, MAX_TOKENS, choice["token_ids"])
    assert choice["token_ids"] == expected
    assert choice["text"] == tokenizer.decode(expected)
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert choice["finish_reason"] == ("length" if len(expected) == MAX_TOKENS else "stop")


async def test_prompts_are_of_many_lengths(checkpoint: Checkpoint) -> None:
    lengths = [len(Tokenizer(checkpoint).encode(prompt)) for prompt in PROMPTS]
    assert len(set(lengths)) == len(PROMPTS)
    assert max(lengths) > 1000


@pytest.mark.parametrize("index", range(len(PROMPTS)))
async def test_alone(http: aiohttp.ClientSession, reference: Reference, checkpoint: Checkpoint, index: int) -> None:
    check(await completion(http, PROMPTS[index]), PROMPTS[index], reference, Tokenizer(checkpoint))


async def test_batched(http: aiohttp.ClientSession, reference: Reference, checkpoint: Checkpoint) -> None:
    answers = await asyncio.gather(*(completion(http, prompt) for prompt in PROMPTS))
    tokenizer = Tokenizer(checkpoint)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check(answer, prompt, reference, tokenizer)
