"""One conversation of the Try it page: what its requests ask for, and what has come of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOOLS_EXAMPLE = """[{"type": "function", "function": {
  "name": "get_weather",
  "description": "Current weather in a city",
  "parameters": {"type": "object", "required": ["city"],
    "properties": {"city": {"type": "string"}}}}}]"""
SCHEMA_EXAMPLE = """{"type": "object", "required": ["capital", "population"],
  "properties": {"capital": {"type": "string"},
    "population": {"type": "integer"}}}"""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a side of the page asks for. None: what the model's own defaults say."""

    max_tokens: int = 256
    temperature: float | None = 0.0
    top_p: float | None = None
    reasoning_effort: str | None = None
    system: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    response_format: Mapping[str, Any] | None = None
    class_name: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, model: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The body of a chat completion. Calls that are required are required once: their results get an answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        has_results = bool(messages) and messages[-1]["role"] == "tool"
        tool_choice = "auto" if has_results and self.tool_choice == "required" else self.tool_choice
        optional = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "reasoning_effort": self.reasoning_effort,
            "response_format": self.response_format,
            **({"tools": list(self.tools), "tool_choice": tool_choice} if self.tools else {}),
        }
        named = {name: value for name, value in optional.items() if value is not None}
        return {"model": model, "messages": [*system, *messages], "max_tokens": self.max_tokens, **named}

    @property
    def is_json(self) -> bool:
        """Whether answers are JSON."""
        return self.response_format is not None


@dataclass(slots=True)
class ToolCall:
    """A call that the model wants made."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""  # JSON


class Answer:
    """Owns what has come of one answer, and when each piece came, as seen by this console."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._begun_s = time.monotonic()
        self._at_s: list[float] = []

    def take(self, choice: Mapping[str, Any]) -> None:
        """Adds a choice of a chunk."""
        delta = choice.get("delta") or {}
        text, reasoning = delta.get("content") or "", delta.get("reasoning") or ""
        calls = delta.get("tool_calls") or ()
        if text or reasoning or calls:
            self._at_s.append(time.monotonic())
        self.text += text
        self.reasoning += reasoning
        for part in calls:
            while len(self.calls) <= part["index"]:
                self.calls.append(ToolCall())
            call, function = self.calls[part["index"]], part.get("function") or {}
            call.call_id = part.get("id") or call.call_id
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def ttft_s(self) -> float | None:
        """Time to the first piece."""
        return self._at_s[0] - self._begun_s if self._at_s else None

    @property
    def tbt_s(self) -> float | None:
        """Mean gap between pieces."""
        return (self._at_s[-1] - self._at_s[0]) / (len(self._at_s) - 1) if len(self._at_s) > 1 else None

    def message(self) -> dict[str, Any]:
        """The assistant's message, as the next request has it in its history."""
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        optional = {"reasoning": self.reasoning, "tool_calls": calls}
        said = {name: value for name, value in optional.items() if value}
        return {"role": "assistant", "content": self.text or None, **said}


def read_tools(text: str) -> list[dict[str, Any]]:
    """Tools from their JSON. Raises ValueError with what to do."""
    tools = _json(text, "tools")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ValueError('tools are a JSON list of {"type": "function", "function": {"name": …, "parameters": …}}')
    return tools


def read_schema(text: str) -> dict[str, Any]:
    """The response format of a JSON schema. Raises ValueError with what to do."""
    schema = _json(text, "the schema")
    if not isinstance(schema, dict):
        raise ValueError('a JSON schema is an object, such as {"type": "object"}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _is_tool(tool: object) -> bool:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return False
    return isinstance(tool["function"].get("name"), str)


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be read as JSON: {error}") from error
