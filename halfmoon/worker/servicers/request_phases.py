"""Phases and spans of a worker's work on one request: the one source of times for timelines and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfmoon.engine.request import TokenOutput
from halfmoon.pb import prefill_pb2
from halfmoon.rpc.telemetry.spans import Attributes, Span

PhaseKind = Literal["queue", "restore", "chunk", "transfer"]

_KINDS: dict[PhaseKind, prefill_pb2.Phase.Kind.ValueType] = {
    "queue": prefill_pb2.Phase.QUEUE,
    "restore": prefill_pb2.Phase.RESTORE,
    "chunk": prefill_pb2.Phase.CHUNK,
    "transfer": prefill_pb2.Phase.TRANSFER,
}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase on this process's clock. prefill.proto defines what each kind includes."""

    kind: PhaseKind
    start_s: float
    end_s: float
    num_tokens: int = 0
    planned_tokens: int = 0
    num_bytes: int = 0

    def end(self, span: Span) -> None:
        """Ends the span that began with this phase."""
        span.end(self.end_s, attributes=self._attributes)

    def record(self, parent: Span) -> None:
        """Adds this phase to `parent` as a child span."""
        parent.child(self.kind, self.start_s).end(self.end_s, attributes=self._attributes)

    @property
    def _attributes(self) -> Attributes:
        counts = {"tokens": self.num_tokens, "planned_tokens": self.planned_tokens, "bytes": self.num_bytes}
        return {f"halfmoon.{name}": count for name, count in counts.items() if count}

    def message(self, called_s: float) -> prefill_pb2.Phase:
        """Converts to protobuf, with times relative to the gateway's call at `called_s`."""
        return prefill_pb2.Phase(
            kind=_KINDS[self.kind],
            start_s=self.start_s - called_s,
            end_s=self.end_s - called_s,
            num_tokens=self.num_tokens,
            planned_tokens=self.planned_tokens,
            num_bytes=self.num_bytes,
        )


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
