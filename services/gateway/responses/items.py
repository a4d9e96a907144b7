"""A response's input items as they are kept and listed."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from services.gateway.openai.bodies.responses_body import InputMessage, Item, ResponsesBody

_KINDS = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def input_items(body: ResponsesBody) -> list[Item]:
    """The body's own input as items."""
    return [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def parsed_items(kept: list[Any]) -> list[Item]:
    """Items that were kept: inputs as `shown_items` gives them, and outputs of responses."""
    return _ITEMS.validate_python(kept)


def shown_items(items: list[Item], response_key: str) -> list[dict[str, Any]]:
    """Items with all their fields: each has an id, a message its parts."""
    return [_shown(item, f"{response_key}_in{number}") for number, item in enumerate(items)]


def _shown(item: Item, key: str) -> dict[str, Any]:
    fields = item.model_dump(mode="json", exclude_none=True)
    kind = fields.setdefault("type", "message")
    if kind == "message":
        fields.setdefault("status", "completed")
        if isinstance(fields["content"], str):
            part = "output_text" if fields["role"] == "assistant" else "input_text"
            own: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
            fields["content"] = [{"type": part, "text": fields["content"], **own}]
    if kind == "reasoning":
        fields["summary"] = []
    return {"id": f"{_KINDS.get(kind, 'msg')}_{key}", **fields}
