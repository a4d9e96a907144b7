"""The latest placements and refusals with their reasons, and what became of each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfmoon.pb.prefill_pb2 import Phase
from halfmoon.policy.placement.candidates import Candidate
from halfmoon.policy.values import AdmissionTargets
from services.gateway.routing.progress import Progress

_MAX_DECISIONS = 512


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided of one request, and by what. Seconds are predictions."""

    request_id: str
    at_s: float  # on the gateway's monotonic clock
    waited_s: float  # from the request's arrival
    qos_class: str
    num_prompt_tokens: int | None  # None where it was refused before they were counted
    candidates: Sequence[Candidate]  # the best ones, and the chosen one
    prefill_worker: str | None  # None where it was refused
    decode_worker: str | None
    ttft_s: float  # from the decision
    tbt_s: float | None  # None for one token
    targets: AdmissionTargets  # the class's own
    applied: AdmissionTargets  # as feedback had them
    refusal: str | None = None

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that it went to."""
        return next((one for one in self.candidates if one.worker_id == self.prefill_worker), None)


@dataclass(frozen=True, slots=True)
class Move:
    """Another placement of the same request, because the one before failed it."""

    at_s: float
    prefill_worker: str
    decode_worker: str


@dataclass(slots=True)
class _Case:
    decision: Decision
    moves: list[Move] = field(default_factory=list)
    measured: dict[str, Any] | None = None  # None while it runs
    phases: Sequence[Phase] = ()  # of its first prefill


class Decisions:
    """Owns the latest decisions by request; the oldest go first. Has no clock."""

    def __init__(self, limit: int = _MAX_DECISIONS) -> None:
        self._limit = limit
        self._cases: OrderedDict[str, _Case] = OrderedDict()

    def note(self, decision: Decision) -> None:
        """A client may name two requests alike: the newer one counts."""
        self._cases.pop(decision.request_id, None)
        self._cases[decision.request_id] = _Case(decision)
        if len(self._cases) > self._limit:
            self._cases.popitem(last=False)

    def note_move(self, request_id: str, move: Move) -> None:
        """It goes on elsewhere."""
        if (case := self._cases.get(request_id)) is not None:
            case.moves.append(move)

    def note_ended(self, request_id: str, progress: Progress, status: str, e2e_s: float) -> None:
        """What was measured of it."""
        if (case := self._cases.get(request_id)) is not None:
            case.phases = progress.phases
            case.measured = {
                "status": status,
                "queue_s": progress.queue_s,
                "prefill_s": progress.prefill_s,
                "ttft_s": progress.ttft_s,
                "tbt_s": progress.mean_tbt_s,
                "e2e_s": e2e_s,
                "cached_tokens": progress.cached_tokens,
                "loaded_tokens": progress.loaded_tokens,
                "output_tokens": len(progress.output_token_ids),
            }

    def newest(self, limit: int, now_s: float) -> list[dict[str, Any]]:
        """As JSON has it, newest first."""
        cases = list(self._cases.values())[-limit:]
        return [_shown(case, now_s) for case in reversed(cases)]

    def of(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """One of them; None when it is not among the latest."""
        case = self._cases.get(request_id)
        return None if case is None else _shown(case, now_s)

    def phases(self, request_id: str) -> Sequence[Phase]:
        """What the prefill worker did for it; nothing where it is not known (any more)."""
        case = self._cases.get(request_id)
        return () if case is None else case.phases


def _shown(case: _Case, now_s: float) -> dict[str, Any]:
    decision = case.decision
    return {
        "request_id": decision.request_id,
        "age_s": now_s - decision.at_s,
        "waited_s": decision.waited_s,
        "qos_class": decision.qos_class,
        "prompt_tokens": decision.num_prompt_tokens,
        "prefill_worker": decision.prefill_worker,
        "decode_worker": decision.decode_worker,
        "refusal": decision.refusal,
        "predicted": {"ttft_s": decision.ttft_s, "tbt_s": decision.tbt_s},
        "targets": asdict(decision.targets),
        "applied": asdict(decision.applied),
        "measured": case.measured,
        "candidates": [{**one._asdict(), "ttft_s": one.ttft_s} for one in decision.candidates],
        "moves": [
            {
                "after_s": move.at_s - decision.at_s + decision.waited_s,
                "prefill_worker": move.prefill_worker,
                "decode_worker": move.decode_worker,
            }
            for move in case.moves
        ],
    }
