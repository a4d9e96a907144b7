"""One request's way over the services, as spans of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Span(NamedTuple):
    """What one service did for the request. Seconds since the request arrived."""

    service: str
    name: str
    start_s: float
    end_s: float
    predicted_s: float | None = None  # how long it should have taken


def timeline(row: Mapping[str, Any], waited_s: float = 0.0) -> list[Span]:
    """The spans of a request, by its row in the ledger and how long it waited for its first placement.

    Of a request that was moved these are the parts of the first attempt, and all of its decoding.
    """
    ttft_s, e2e_s = row["ttft_s"], row["e2e_s"]
    admitted_s = min(waited_s, e2e_s)
    spans = [Span("gateway", "admission", 0.0, admitted_s)]
    if row["prefill_worker"] is None:
        return spans
    prefill, decode = row["prefill_worker"], row["decode_worker"]
    end_s = e2e_s if ttft_s is None else ttft_s
    if row["queue_s"] is None or row["prefill_s"] is None:
        spans.append(Span(prefill, "prefill", admitted_s, end_s))
    else:
        begun_s = min(admitted_s + row["queue_s"], end_s)
        computed_s = min(begun_s + row["prefill_s"], end_s)
        spans.append(Span(prefill, "queue", admitted_s, begun_s, row["predicted_queue_s"]))
        spans.append(Span(prefill, "prefill", begun_s, computed_s, row["predicted_prefill_s"]))
        spans.append(Span("gateway", "first token", computed_s, end_s))
    if ttft_s is not None:
        num_gaps = max(row["output_tokens"] - 1, 0)
        predicted_s = row["predicted_tbt_s"] * num_gaps if row["predicted_tbt_s"] is not None else None
        spans.append(Span(decode, "decode", ttft_s, e2e_s, predicted_s))
    return spans
