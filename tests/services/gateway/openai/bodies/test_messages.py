"""What the chat template sees of a message."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.openai.bodies.messages import Message


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": [1, "\\u00e9"]}', {"a": [1, "é"]}),
        ("", ""),
        ("{", "{"),
        ("[" * 500, "[" * 500),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),  # half an emoji, which no tokenizer takes
    ],
)
def test_arguments_are_values_if_they_can_be(arguments: str, shown: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.for_template()["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}
