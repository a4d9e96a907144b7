"""Trace span of one request's decoding, with a child span until the first token decoded here."""

from __future__ import annotations

from halfmoon.engine.request import TokenOutput
from halfmoon.rpc.spans import Attributes, Span


class DecodeSpan:
    """Owns the span that begins when the request joins the batch."""

    def __init__(self, parent: Span, start_s: float) -> None:
        self._start_s = start_s
        self._span = parent.child("decode", start_s)

    def first(self, at_s: float) -> None:
        """Records the first token decoded here."""
        self._span.child("first token", self._start_s).end(at_s)

    def end(self, last: TokenOutput | None, at_s: float) -> None:
        """Ends the span. `last` is the request's last token; None if the request was cancelled."""
        if last is None:
            self._span.end(at_s, error="cancelled")
            return
        reason = str(last.finish_reason)
        counted: Attributes = {"halfmoon.finish_reason": reason, "halfmoon.output_tokens": last.position + 1}
        self._span.end(at_s, error=reason if reason == "error" else None, attributes=counted)
