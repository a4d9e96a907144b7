"""Bodies made to keep the gateway busy: few errors are collected, and few values are made, whatever is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from halfmoon.errors import InvalidRequest
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody

HI = {"role": "user", "content": "hi"}
MANY = 20_000


def refusal(schema: type[ChatBody | CompletionBody], **fields: Any) -> InvalidRequest:
    body = {"model": "m", **({"messages": [HI]} if schema is ChatBody else {"prompt": "hi"}), **fields}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(schema, json.dumps(body).encode(), max_values=1_000_000)
    return caught.value


@pytest.mark.parametrize(
    ("schema", "fields", "param"),
    [
        (ChatBody, {"messages": [1] * MANY}, "messages[0]"),
        (ChatBody, {"messages": [{"role": "user", "content": ""}] * MANY}, "messages"),
        (ChatBody, {"messages": [{**HI, "content": [1] * MANY}]}, "messages[0].content[0]"),
        (ChatBody, {"messages": [{str(name): 1 for name in range(MANY)}]}, "messages[0].0"),
        (ChatBody, {"logit_bias": {str(name): "x" for name in range(MANY)}}, "logit_bias"),
        (ChatBody, {"stop": [1] * MANY}, "stop[0]"),
        (ChatBody, {"stop_token_ids": ["x"] * MANY}, "stop_token_ids[0]"),
        (ChatBody, {str(name): 1 for name in range(MANY)}, "0"),
        (CompletionBody, {"prompt": [[1]] * MANY}, "prompt"),
        (CompletionBody, {"prompt": ["x"] * MANY}, "prompt"),
        (CompletionBody, {"prompt": [1] * MANY + ["x"]}, f"prompt[{MANY}]"),
        (CompletionBody, {"prompt": [["x"] * MANY]}, "prompt[0][0]"),
    ],
)
def test_a_million_mistakes_are_a_few_errors(
    schema: type[ChatBody | CompletionBody], fields: dict[str, Any], param: str
) -> None:
    refused = refusal(schema, **fields)
    assert refused.param == param
    assert isinstance(refused.__cause__, ValidationError)
    assert refused.__cause__.error_count() <= 4


def test_too_many_values_are_refused_unread() -> None:
    for raw in (b"[" * 11, b"{" * 11, b"," * 11):  # no JSON at all: nobody looked
        with pytest.raises(InvalidRequest, match="more than 10 values"):
            parse_body(ChatBody, raw, max_values=10)


def test_whole_numbers_may_have_a_fraction_of_zero() -> None:
    """As in JSON Schema, where 16.0 is an integer: some languages have no other numbers."""
    body = {"messages": [HI], "max_tokens": 16.0, "n": 1e0, "temperature": 1.0, "logit_bias": {"5": 2.0}}
    parsed = parse_body(ChatBody, json.dumps(body).encode(), max_values=100)
    assert (parsed.max_tokens, parsed.n, parsed.temperature, parsed.logit_bias) == (16, 1, 1.0, {"5": 2.0})
    for wrong in (16.5, "16", True):
        assert refusal(ChatBody, max_tokens=wrong).param == "max_tokens"


def test_long_names_are_cut_off() -> None:
    refused = refusal(ChatBody, **{"x" * 10_000: 1})
    assert refused.param == "x" * 200 + "…"
    assert len(refused.message) < 300
