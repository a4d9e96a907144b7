"""The latest placements and refusals, with their reasons and how each request ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfmoon.pb.prefill_pb2 import Phase
from halfmoon.policy.placement.candidates import Candidate
from halfmoon.policy.values import AdmissionTargets, Disaggregation, PromptSharing
from services.gateway.progress import Progress

_MAX_DECISIONS = 512


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of admission and placement, and the predictions that it was based on."""

    request_id: str
    at_s: float  # on the gateway's monotonic clock
    waited_s: float  # from the request's arrival
    qos_class: str
    num_prompt_tokens: int | None  # None where it was refused before they were counted
    candidates: Sequence[Candidate]  # the best prefill workers, and the chosen one
    prefill_worker: str | None  # None where it was refused
    decode_worker: str | None
    ttft_s: float  # from the decision
    tbt_s: float | None  # None for one token
    targets: AdmissionTargets  # the class's own
    applied: AdmissionTargets  # as feedback had tightened them
    refusal: str | None = None
    transfer_s: float | None = None  # of what is to be loaded; None where nothing is
    disaggregation: Disaggregation | None = None  # why a decode worker computes the prompt, or why not
    sharing: PromptSharing | None = None  # why several prefill workers compute the prompt, or why not
    helpers: Sequence[str] = ()  # prefill workers that compute parts of it beside `prefill_worker`


@dataclass(frozen=True, slots=True)
class Move:
    """Another placement of the same request, after the previous one failed."""

    at_s: float
    prefill_worker: str
    decode_worker: str


@dataclass(slots=True)
class _Entry:
    decision: Decision
    moves: list[Move] = field(default_factory=list)
    measured: dict[str, Any] | None = None  # None while it runs
    phases: Sequence[Phase] = ()  # of its first attempt's prefill


class Decisions:
    """Owns the latest decisions by request id; drops the oldest. Has no clock."""

    def __init__(self, limit: int = _MAX_DECISIONS) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def note(self, decision: Decision) -> None:
        """Adds a decision. A client may give two requests the same id: the newer one counts."""
        self._entries.pop(decision.request_id, None)
        self._entries[decision.request_id] = _Entry(decision)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def note_move(self, request_id: str, move: Move) -> None:
        """Adds a move to its decision."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.moves.append(move)

    def note_ended(self, request_id: str, progress: Progress, status: str, e2e_s: float) -> None:
        """Adds what was measured."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.phases = progress.phases
            entry.measured = {
                "status": status,
                "queue_s": progress.queue_s,
                "prefill_s": progress.prefill_s,
                "transfer_s": progress.transfer_s,
                "ttft_s": progress.ttft_s,
                "tbt_s": progress.mean_tbt_s,
                "e2e_s": e2e_s,
                "cached_tokens": progress.cached_tokens,
                "loaded_tokens": progress.loaded_tokens,
                "output_tokens": len(progress.output_token_ids),
                "drafts": progress.num_drafts,
                "right_drafts": progress.num_right_drafts,
            }

    def newest(self, limit: int, now_s: float) -> list[dict[str, Any]]:
        """The latest decisions as JSON values, newest first."""
        entries = list(self._entries.values())[-limit:]
        return [_shown(entry, now_s) for entry in reversed(entries)]

    def of(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """One decision as a JSON value; None if it is not among the latest."""
        entry = self._entries.get(request_id)
        return None if entry is None else _shown(entry, now_s)

    def phases(self, request_id: str) -> Sequence[Phase]:
        """What the prefill worker did for the request; empty if it is not among the latest."""
        entry = self._entries.get(request_id)
        return () if entry is None else entry.phases


def _shown(entry: _Entry, now_s: float) -> dict[str, Any]:
    decision = entry.decision
    return {
        "request_id": decision.request_id,
        "age_s": now_s - decision.at_s,
        "waited_s": decision.waited_s,
        "qos_class": decision.qos_class,
        "prompt_tokens": decision.num_prompt_tokens,
        "prefill_worker": decision.prefill_worker,
        "decode_worker": decision.decode_worker,
        "refusal": decision.refusal,
        "disaggregation": decision.disaggregation,
        "sharing": decision.sharing,
        "helpers": list(decision.helpers),
        "predicted": {"ttft_s": decision.ttft_s, "tbt_s": decision.tbt_s, "transfer_s": decision.transfer_s},
        "targets": asdict(decision.targets),
        "applied": asdict(decision.applied),
        "measured": entry.measured,
        "candidates": [{**candidate._asdict(), "ttft_s": candidate.ttft_s} for candidate in decision.candidates],
        "moves": [
            {
                "after_s": move.at_s - decision.at_s + decision.waited_s,
                "prefill_worker": move.prefill_worker,
                "decode_worker": move.decode_worker,
            }
            for move in entry.moves
        ],
    }
