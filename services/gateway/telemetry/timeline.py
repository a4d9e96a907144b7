"""The timeline of one request: what each service did for it, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from halfmoon.pb.prefill_pb2 import Phase


class TimelineSpan(NamedTuple):
    """What one service did for the request. Times are seconds since the request arrived."""

    service: str
    name: str
    start_s: float
    end_s: float
    predicted_s: float | None = None  # how long it should have taken
    num_tokens: int | None = None  # computed or loaded
    num_bytes: int | None = None  # sent


def timeline(row: Mapping[str, Any], waited_s: float = 0.0, phases: Sequence[Phase] = ()) -> list[TimelineSpan]:
    """The spans of a request, from its ledger row, its wait for the first placement, and the phases that the prefill
    worker reported, which are known for the latest requests only.

    For a request that was moved, these are the phases of the first attempt, and all of its decoding.
    """
    ttft_s, e2e_s = row["ttft_s"], row["e2e_s"]
    admitted_s = min(waited_s, e2e_s)
    spans = [TimelineSpan("gateway", "admission", 0.0, admitted_s)]
    if row["prefill_worker"] is None:
        return spans
    spans += _prefill_spans(row, admitted_s, e2e_s if ttft_s is None else ttft_s, phases)
    spans += [span for phase in phases for span in _phase_spans(row, phase, admitted_s)]
    if ttft_s is not None:
        num_gaps = max(row["output_tokens"] - 1, 0)
        predicted_s = row["predicted_tbt_s"] * num_gaps if row["predicted_tbt_s"] is not None else None
        spans.append(TimelineSpan(row["decode_worker"], "decode", ttft_s, e2e_s, predicted_s))
    return spans


def _prefill_spans(
    row: Mapping[str, Any], admitted_s: float, end_s: float, phases: Sequence[Phase]
) -> list[TimelineSpan]:
    """The spans from the placement to the first token, which came at `end_s`."""
    prefill = row["prefill_worker"]
    if row["queue_s"] is None or row["prefill_s"] is None:
        return [TimelineSpan(prefill, "prefill", admitted_s, end_s)]
    queued_s = next((admitted_s + phase.start_s for phase in phases if phase.kind == Phase.QUEUE), admitted_s)
    queued_s = min(queued_s, end_s)
    begun_s = min(queued_s + row["queue_s"], end_s)
    computed_s = min(begun_s + row["prefill_s"], end_s)
    return [
        TimelineSpan(prefill, "queue", queued_s, begun_s, row["predicted_queue_s"]),
        TimelineSpan(prefill, "prefill", begun_s, computed_s, row["predicted_prefill_s"]),
        TimelineSpan("gateway", "first token", computed_s, end_s),
    ]


def _phase_spans(row: Mapping[str, Any], phase: Phase, admitted_s: float) -> list[TimelineSpan]:
    """The span of work that runs in parallel, on a line of its own."""
    prefill, decode = row["prefill_worker"], row["decode_worker"]
    start_s, end_s = (min(max(admitted_s + at_s, 0.0), row["e2e_s"]) for at_s in (phase.start_s, phase.end_s))
    match phase.kind:
        case Phase.RESTORE:
            return [TimelineSpan(f"store → {prefill}", "restore", start_s, end_s, num_tokens=phase.num_tokens)]
        case Phase.CHUNK:
            return [TimelineSpan(f"{prefill}: steps", "chunk", start_s, end_s, num_tokens=phase.num_tokens)]
        case Phase.TRANSFER:
            return [TimelineSpan(f"{prefill} → {decode}", "transfer", start_s, end_s, num_bytes=phase.num_bytes)]
    return []
