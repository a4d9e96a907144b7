"""The response and the events of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.replies.logprob_entries import logprob_entries
from services.gateway.replies.reply_format import Output, ReplyOptions, Usage, UsageNow
from services.gateway.replies.text_stream import Decodes, Ending, TextPiece

_STATUS: dict[Ending | None, str] = {None: "in_progress", "stop": "completed", "length": "incomplete"}


class ResponsesFormat:
    """Owns a response's text so far and the number of its events. It has one message with one text."""

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
    ) -> None:
        """`echoed` are the fields that the response repeats from the request."""
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model, **echoed}
        self._item_id = f"msg_{request_id}"
        self._tokenizer = tokenizer
        self._options = options
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._ending: Ending | None = None
        self._num_events = 0

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The events that open the response, its message and its text."""
        response = self._response([], None)
        item = {**self._item(), "content": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=self._part()),
        ]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """At most one delta."""
        entries = self._take(piece)
        if not self._options.shows(piece):
            return []
        return [self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=entries)]

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """The chunk unchanged: the usage comes at the end."""
        return chunk

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The events that close text, message and response, each with its whole content."""
        done = self._event("response.output_text.done", **self._place(), text=self._text, logprobs=self._logprobs)
        return [
            done,
            self._event("response.content_part.done", **self._place(), part=self._part()),
            self._event("response.output_item.done", output_index=0, item=self._item()),
            self._event(f"response.{_STATUS[self._ending]}", response=self._response([self._item()], usage)),
        ]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error event."""
        fields = error["error"]
        return self._event("error", code=fields["code"], message=fields["message"], param=fields["param"])

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response object."""
        self._take(outputs[0].piece)
        return self._response([self._item()], usage)

    def _take(self, piece: TextPiece) -> list[dict[str, Any]]:
        entries = logprob_entries(piece.tokens, self._tokenizer, self._options) if self._options.logprobs else []
        self._text += piece.text
        self._logprobs += entries
        self._ending = piece.finish_reason
        return entries

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _item(self) -> dict[str, Any]:
        status = _STATUS[self._ending]
        head = {"type": "message", "id": self._item_id, "role": "assistant", "status": status}
        return {**head, "content": [self._part()]}

    def _response(self, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if self._ending == "length" else None
        return {
            **self._head,
            "status": _STATUS[self._ending],
            "error": None,
            "incomplete_details": cut,
            "output": output,
            "usage": usage and _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
