"""What a body asks for: which special tokens have a text, and what is too much to repeat in each output."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from services.gateway.openai.endpoint_bodies import generation_request_of, read_body
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.openai.served_model import SpecialTokens
from tests.services.gateway.fakes import served_model

TOOL = {"type": "function", "function": {"name": "f"}}
LONG = 3_000_000


def asked(endpoint: str, **fields: Any) -> GenerationRequest:
    model = dataclasses.replace(served_model(), tool_format="mistral", context_tokens=2 * LONG)
    body = read_body(endpoint, json.dumps(fields).encode(), model, 2 * LONG).body
    return generation_request_of(body, model, 2 * LONG, b"")


@pytest.mark.parametrize(
    ("extra", "special_tokens"),
    [
        ({}, "hidden"),
        ({"skip_special_tokens": False}, "shown"),
        ({"tools": [TOOL]}, "marks"),
        ({"tools": [TOOL], "skip_special_tokens": True}, "marks"),
        ({"tools": [TOOL], "skip_special_tokens": False}, "shown"),
        ({"tools": [TOOL], "tool_choice": "required"}, "hidden"),
    ],
)
def test_marks_of_calls_have_a_text_and_no_other_special_tokens(
    extra: dict[str, Any], special_tokens: SpecialTokens
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert asked("chat.completions", messages=messages, **extra).special_tokens == special_tokens


@pytest.mark.parametrize("extra", [{"echo": True}, {"return_token_ids": True}])
def test_a_long_prompt_is_not_repeated_in_many_outputs(extra: dict[str, Any]) -> None:
    prompt = "ab " * (LONG // 3)
    assert asked("completions", prompt=prompt, **extra).num_outputs == 1
    assert asked("completions", prompt=prompt, n=6).num_outputs == 6
    with pytest.raises(InvalidRequest, match="smaller n") as refusal:
        asked("completions", prompt=prompt, n=6, **extra)
    assert refusal.value.param == "n"
