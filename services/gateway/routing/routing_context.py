"""What early rejection and routing share in one gateway."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.placement.candidates import Candidate, ranked_candidates
from halfmoon.policy.values import MostSeen, Placement, TtftPrediction
from halfmoon.policy.view.capabilities import Bools
from halfmoon.rpc.telemetry.spans import current_span
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import PrefixCopies
from services.gateway.telemetry.recent_telemetry import RecentTelemetry

_SHOWN_CANDIDATES = 6  # of the prefill workers that a prompt could have gone to


def _names() -> Iterator[str]:
    return map(str, itertools.count())


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """The admission controller, what it reads, and where decisions are recorded.

    Owns the names by which the controller knows outputs: clients may give two requests the same id.
    """

    admission: AdmissionController
    membership: Membership
    clock: Callable[[], float]
    telemetry: RecentTelemetry
    copies: PrefixCopies
    names: Iterator[str] = field(default_factory=_names)

    def same_kv(self, worker_id: str) -> Bools:
        """The rows [num_rows] whose blocks are of the kind that a worker has."""
        view, membership = self.membership.view(), self.membership
        layout, rows = membership.layout_of(worker_id), np.zeros(view.num_rows, dtype=np.bool_)
        alike = [one.worker_id for one in view.workers if membership.layout_of(one.worker_id) == layout]
        rows[view.rows_of(alike)] = True
        return rows

    def candidates(
        self,
        num_prompt_tokens: int,
        most_seen: MostSeen,
        ranked_by: TtftPrediction | None,
        placement: Placement | None = None,
    ) -> Sequence[Candidate]:
        """The prefill workers that a decision is shown with: the best ones, and the chosen one."""
        if ranked_by is None:
            return ()
        view = self.membership.view()
        return ranked_candidates(view, num_prompt_tokens, ranked_by, _SHOWN_CANDIDATES, placement, most_seen.prompt)


def trace_admission(arrived_s: float, now_s: float, refusal: Refused | None = None) -> None:
    """Records a span from the request's arrival to the decision."""
    span = current_span().child("admission", arrived_s)
    span.end(now_s, error=None if refusal is None else refusal.message)
