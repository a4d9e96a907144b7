"""The response and the events of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.gateway.replies.call_parts import CallPart, NewToolParser, ParsedPart, ReasoningPart
from services.gateway.replies.chat_format import CallIds, new_turn
from services.gateway.replies.logprob_entries import logprob_entries
from services.gateway.replies.reply_format import Output, ReplyOptions, Usage, UsageNow
from services.gateway.replies.text_stream import Decodes, Ending, TextPiece

_STATUS: dict[Ending | None, str] = {None: "in_progress", "stop": "completed", "length": "incomplete"}


@dataclass(slots=True)
class _Item:
    """One item of the output: a message with one text, reasoning, or a call."""

    id: str
    kind: Literal["message", "reasoning", "call"]
    call: CallPart | None = None
    text: str = ""  # or the arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def shown(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        """The item as it is now."""
        content = [] if is_empty else [self.part()]
        if self.kind == "message":
            return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content}
        if self.call is None:
            return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content}
        named = {"call_id": self.call.id, "name": self.call.name, "arguments": "" if is_empty else self.text}
        return {"type": "function_call", "id": self.id, "status": status, **named}

    def part(self) -> dict[str, Any]:
        """A message's text, or reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}


class ResponsesFormat:
    """Owns the items of a response so far, of which the last may be open, and the number of its events."""

    end = b""
    repeats = False  # events are numbered

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Decodes,
        options: ReplyOptions,
        echoed: dict[str, Any],
        new_tool_parser: NewToolParser | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        """`echoed` are the fields that the response repeats from the request; `call_ids` as for a chat."""
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model, **echoed}
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._options = options
        self._turn = new_turn(new_tool_parser, call_ids)
        self._items: list[_Item] = []
        self._entries: list[dict[str, Any]] = []  # log-probabilities for the next text: also of tags and reasoning
        self._is_open = False
        self._ending: Ending | None = None
        self._num_events = 0

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The events that open the response."""
        response = self._response(None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Deltas of items, which begin and end as the model goes from text to calls."""
        if self._options.logprobs:
            self._entries += logprob_entries(piece.content, self._tokenizer, self._options)
        parts: Sequence[ParsedPart] = [piece.text] if self._turn is None else self._turn.parts(piece)
        events = []
        for part in parts:
            if isinstance(part, CallPart):
                events += self._called(part)
            elif isinstance(part, ReasoningPart):
                events += self._thought(part.text)
            elif part or (self._turn is None and self._options.shows(piece)):
                events += self._said(part)
        self._ending = piece.finish_reason
        return events

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """The chunk unchanged: the usage comes at the end."""
        return chunk

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The events that close the last item and the response, each with its whole content."""
        events = [] if self._items else self._begin(_Item(self._item_id("msg"), "message"))
        events += self._close(_STATUS[self._ending])
        return [*events, self._event(f"response.{_STATUS[self._ending]}", response=self._response(usage))]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error event."""
        fields = error["error"]
        return self._event("error", code=fields["code"], message=fields["message"], param=fields["param"])

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response object."""
        self.chunks(0, outputs[0].piece)
        if not self._items:
            self._begin(_Item(self._item_id("msg"), "message"))
        return self._response(usage)

    def _said(self, text: str) -> list[dict[str, Any]]:
        entries, self._entries = self._entries, []
        begun = [] if self._has_open("message") else self._begin(_Item(self._item_id("msg"), "message"))
        item = self._items[-1]
        item.text += text
        item.logprobs += entries
        return [*begun, self._event("response.output_text.delta", **self._place(), delta=text, logprobs=entries)]

    def _thought(self, text: str) -> list[dict[str, Any]]:
        begun = [] if self._has_open("reasoning") else self._begin(_Item(self._item_id("rs"), "reasoning"))
        self._items[-1].text += text
        return [*begun, self._event("response.reasoning_text.delta", **self._place(), delta=text)]

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self._items[-1].kind == kind

    def _called(self, part: CallPart) -> list[dict[str, Any]]:
        begun = [] if part.id is None else self._begin(_Item(self._item_id("fc"), "call", part))
        self._items[-1].text += part.arguments
        event = "response.function_call_arguments.delta"
        return [*begun, self._event(event, **self._place(), delta=part.arguments)]

    def _begin(self, item: _Item) -> list[dict[str, Any]]:
        """The events that end the item before and begin this one."""
        events = self._close("completed")
        self._items.append(item)
        self._is_open = True
        shown = item.shown("in_progress", is_empty=True)
        events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown))
        if item.kind == "message":
            events.append(self._event("response.content_part.added", **self._place(), part=item.part()))
        return events

    def _close(self, status: str) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        item, place = self._items[-1], self._place()
        if item.kind == "message":
            closed = [
                self._event("response.output_text.done", **place, text=item.text, logprobs=item.logprobs),
                self._event("response.content_part.done", **place, part=item.part()),
            ]
        elif item.call is None:
            closed = [self._event("response.reasoning_text.done", **place, text=item.text)]
        else:
            event = "response.function_call_arguments.done"
            closed = [self._event(event, **place, name=item.call.name, arguments=item.text)]
        index = place["output_index"]
        return [*closed, self._event("response.output_item.done", output_index=index, item=item.shown(status))]

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _place(self) -> dict[str, Any]:
        """Where the last item is."""
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.call is not None else {**place, "content_index": 0}

    def _item_id(self, kind: str) -> str:
        number = len(self._items)
        return f"{kind}_{self._request_id}" if not number else f"{kind}_{self._request_id}_{number}"

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        status = _STATUS[self._ending]
        last = len(self._items) - 1
        items = [item.shown(status if number == last else "completed") for number, item in enumerate(self._items)]
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._ending == "length" else None,
            "output": items,
            "usage": usage and _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
