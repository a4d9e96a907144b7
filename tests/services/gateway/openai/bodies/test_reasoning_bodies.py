"""What bodies say of reasoning reaches the chat template."""

from __future__ import annotations

import pytest

from services.gateway.openai.bodies.anthropic_body import MessagesBody
from services.gateway.openai.bodies.responses_body import ResponsesBody


def test_reasoning_of_a_response_goes_back_with_what_it_led_to() -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hi"},
        *(thought, call, {"type": "function_call_output", "call_id": "c", "output": "1"}),
        *(thought, {"role": "assistant", "content": "so"}),
        *(thought, {"role": "user", "content": "and?"}),
    ]
    chat = ResponsesBody.model_validate({"input": items, "include": ["reasoning.encrypted_content"]}).as_chat()
    thoughts = [(message.role, message.reasoning_content) for message in chat.messages]
    assert thoughts == [("user", None), ("assistant", "hm"), ("tool", None), ("assistant", "hm"), ("user", None)]
    assert not chat.logprobs


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, is_on: bool) -> None:
    turns = [{"role": "user", "content": "hi"}]
    body = {"max_tokens": 5, "messages": turns, "thinking": {"type": kind, "budget_tokens": 9}}
    variables = MessagesBody.model_validate(body).as_chat().template_variables()
    assert variables == {"enable_thinking": is_on, "thinking": is_on}
    silent = MessagesBody.model_validate({"max_tokens": 5, "messages": turns})
    assert silent.as_chat().template_variables() == {}
