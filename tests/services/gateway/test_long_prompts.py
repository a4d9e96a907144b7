"""A long prompt does not keep the gateway from its other work, whether it fits or not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.openai.endpoint_bodies import generation_request_of, read_body
from services.gateway.openai.prompts import refuse_hopeless
from services.gateway.openai.served_model import ServedModel
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, PATIENCE_S, ByteTokenizer, running_fleet, served_model

CONTEXT_TOKENS = 10_000


def take_in(endpoint: str, raw: bytes, model: ServedModel, context_tokens: int) -> None:
    generation_request_of(read_body(endpoint, raw, model, context_tokens).body, model, context_tokens, b"")


class CountingTokenizer(ByteTokenizer):
    """Notes how long the texts were that it was asked to encode."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text, with_special=with_special)


@pytest.mark.parametrize(
    ("num_chars", "most_encoded"), [(3_000_000, 0), (2_000_000, 25_000), (100_000, 25_000), (11_000, 30_000)]
)
def test_little_of_a_text_that_cannot_fit_is_tokenized(num_chars: int, most_encoded: int) -> None:
    for endpoint, fields, param in (
        ("chat.completions", {"messages": [{"role": "user", "content": "a" * num_chars}]}, "messages"),
        ("completions", {"prompt": "a" * num_chars}, "prompt"),
    ):
        tokenizer = CountingTokenizer()
        model = dataclasses.replace(served_model(), tokenizer=tokenizer)
        with pytest.raises(ContextLengthExceeded, match="10000 tokens") as caught:
            take_in(endpoint, json.dumps({"model": MODEL, **fields}).encode(), model, CONTEXT_TOKENS)
        assert caught.value.param == param
        assert sum(tokenizer.lengths) <= most_encoded
        assert all(length <= 2 * CONTEXT_TOKENS for length in tokenizer.lengths)


def test_many_short_messages_are_counted_with_what_the_template_writes() -> None:
    tokenizer = CountingTokenizer()
    model = dataclasses.replace(served_model(), tokenizer=tokenizer)
    body = {"model": MODEL, "messages": [{"role": "user", "content": ""}] * 10_000}
    with pytest.raises(ContextLengthExceeded):
        take_in("chat.completions", json.dumps(body).encode(), model, CONTEXT_TOKENS)
    assert all(length <= 2 * CONTEXT_TOKENS for length in tokenizer.lengths)


def test_far_too_many_token_ids() -> None:
    body = json.dumps({"model": MODEL, "prompt": [1] * 200_000}).encode()
    with pytest.raises(ContextLengthExceeded, match="120000"):
        take_in("completions", body, served_model(), CONTEXT_TOKENS)


@given(st.integers(0, 3000), st.integers(1, 250))
def test_a_text_that_fits_is_never_refused(num_words: int, chars_per_token: int) -> None:
    """Also where each slice costs a token more at each end."""

    def encode(text: str) -> list[int]:
        return [0] * (len(text) // chars_per_token + 2)

    refuse_hopeless(("x" * (chars_per_token - 1) + " ") * num_words, encode, max(num_words, 1), "prompt")


class WaitingTokenizer(ByteTokenizer):
    """Encodes only when somebody else got to work meanwhile."""

    def __init__(self) -> None:
        self.others_worked = threading.Event()
        self.began = threading.Event()

    def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
        self.began.set()
        assert self.others_worked.wait(PATIENCE_S)
        return super().encode(text, with_special=with_special)


async def test_the_gateway_answers_while_a_long_prompt_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = WaitingTokenizer()
    monkeypatch.setattr(fakes, "served_model", lambda aliases: dataclasses.replace(served_model(), tokenizer=tokenizer))
    body = json.dumps({"model": MODEL, "prompt": "a" * 20_000}).encode()
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession() as session:
        long = asyncio.ensure_future(session.post(f"{fleet.http}/v1/completions", data=body))
        assert await asyncio.to_thread(tokenizer.began.wait, PATIENCE_S)
        async with session.get(f"{fleet.http}/v1/models") as response:
            assert response.status == 200
        tokenizer.others_worked.set()
        async with await long as refusal:
            assert (await refusal.json())["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", [" " * 600_000, "a" * 600_000, "x " + "?" * 600_000, "\u00e4" * 600_000])
def test_a_run_that_is_one_word_to_a_tokenizer_is_refused(text: str) -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(ContextLengthExceeded, match=r"the prompt has a run of \d+ letters, spaces or signs"):
        refuse_hopeless(text, tokenizer.encode, 1_000_000_000, "prompt")
    assert tokenizer.lengths == []


def test_a_long_text_of_words_is_not_refused() -> None:
    refuse_hopeless("many words, and signs.\n" * 30_000, ByteTokenizer().encode, 690_000, "prompt")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 1_000_000},
        {"prompt": " " * 1_000_000},
        {"prompt": "word " * 10_000},
        {"messages": [{"role": "user", "content": "a" * 1_000_000}]},
    ],
)
async def test_what_cannot_fit_is_not_tokenized_for_its_own_sake(tmp_path: Path, body: dict[str, object]) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession() as session:
        async with session.post(f"{fleet.http}/tokenize", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == next(iter(body))
        async with session.post(f"{fleet.http}/detokenize", json={"tokens": [97] * 401}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", "tokens")
        async with session.post(f"{fleet.http}/detokenize", json={"tokens": [97] * 400}) as response:
            assert (await response.json())["prompt"] == "a" * 400
