"""Tools for a model whose chat template has no place for them: described to it, and called by it, in plain text.

Calls look as Hermes and Qwen write them, so the same parser finds them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.gateway.openai.bodies.messages import CalledTool, Message

_INSTRUCTIONS = """You can call functions. Each line between the tags describes one as JSON:
<tools>
{tools}
</tools>
To call a function, write its name and an object of its arguments in this form, once for each call:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
The results come in <tool_response> tags. Answer in plain words where no call is needed."""


def with_described_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The conversation as text alone: tools in the system message, earlier calls and results in tags."""
    turns = _with_results_joined(messages)
    if not tools:
        return turns
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    if turns and turns[0].role in ("system", "developer"):
        return [turns[0].model_copy(update={"content": f"{turns[0].text}\n\n{instructions}"}), *turns[1:]]
    return [Message(role="system", content=instructions), *turns]


def _with_results_joined(messages: Sequence[Message]) -> list[Message]:
    """The messages as text. Results and what the user says with them are one message: templates want turns."""
    turns: list[tuple[Message, list[str]]] = []
    follows_result = False
    for message in messages:
        text, is_result = _as_text(message), message.role == "tool"
        if turns and text.role == turns[-1][0].role == "user" and (is_result or follows_result):
            turns[-1][1].append(text.text)
        else:
            turns.append((text, []))
        follows_result = is_result
    return [
        first.model_copy(update={"content": "\n".join([first.text, *more])}) if more else first for first, more in turns
    ]


def _as_text(message: Message) -> Message:
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>\n{message.text}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(f"<tool_call>\n{_call(call)}\n</tool_call>" for call in message.tool_calls)
    return message.model_copy(
        update={"content": f"{message.text}\n{calls}" if message.text else calls, "tool_calls": None}
    )


def _call(call: CalledTool) -> str:
    return f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments or "{}"}}}'
