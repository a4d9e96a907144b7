"""The requests that admission has let in: their work, the reserved tokens they use, and whose turn has come."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from halfmoon.policy.admission.degradation import Admitted
from halfmoon.policy.admission.fair_shares import FairShares, token_cost
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.reservations import Reservations
from halfmoon.policy.admission.tenants import ANYONE, Tenant
from halfmoon.policy.forecast.request_forecast import RequestForecast, RunningRequest
from halfmoon.policy.values import Placement, UnloadedLatency
from halfmoon.policy.view.cluster_view import ClusterView


@dataclass(frozen=True, slots=True)
class Inside:
    """What an admitted request occupies, and its work."""

    qos: QosClass
    work: RunningRequest
    reserved_tokens: int
    unloaded: UnloadedLatency
    handover_s: float  # predicted
    entered_s: float


class RequestsInside:
    """Owns the requests inside, and the use of reservations that follows from them.

    Reports each to the forecast and to the fair shares.
    """

    def __init__(self, forecast: RequestForecast, shares: FairShares) -> None:
        self.reservations = Reservations()
        self._forecast = forecast
        self._shares = shares
        self._inside: dict[str, Inside] = {}
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        return len(self._inside)

    def get(self, request_id: str) -> Inside | None:
        """The request, if it is inside."""
        return self._inside.get(request_id)

    @property
    def waiting(self) -> Set[str]:
        """Requests whose turn has not come: no refusal waits for their end."""
        return self._waiting

    def enter(
        self,
        request_id: str,
        view: ClusterView,
        admitted: Admitted,
        num_prompt_tokens: int,
        now_s: float,
        tenant: Tenant = ANYONE,
    ) -> None:
        """Sends a request, reserved or not, to its workers."""
        self._let_in(request_id, admitted, num_prompt_tokens, now_s, tenant)
        self._waiting.discard(request_id)
        self.move(request_id, view, admitted.placement, now_s)

    def reserve(
        self,
        request_id: str,
        view: ClusterView,
        admitted: Admitted,
        num_prompt_tokens: int,
        now_s: float,
        tenant: Tenant = ANYONE,
    ) -> None:
        """Counts an admitted request before its turn comes, so that others of the same client are judged with it."""
        work = self._let_in(request_id, admitted, num_prompt_tokens, now_s, tenant)
        self._waiting.add(request_id)
        self._forecast.reserve(request_id, view, work, admitted.placement, now_s)

    def activate(self, request_id: str, now_s: float) -> None:
        """Takes a reserved request out of the forecast, to be placed next: it must not compete with itself."""
        self._forecast.leave(request_id, now_s)

    def release(self, request_id: str, now_s: float) -> None:
        """Drops a reserved request without a trace."""
        self._let_out(request_id, now_s)
        self._shares.leave(request_id, 0.0)

    def move(self, request_id: str, view: ClusterView, placement: Placement, now_s: float) -> None:
        """Sends a request to these workers, and takes it off any others."""
        self._shares.send(request_id)
        self._forecast.move(request_id, view, self._inside[request_id].work, placement, now_s)

    def begin_decode(self, request_id: str, now_s: float) -> None:
        """Notes the first token of a request."""
        self._shares.begin(request_id)
        self._forecast.begin_decode(request_id, now_s)

    def leave(self, request_id: str, now_s: float, num_output: int) -> Inside:
        """Removes a request that has ended with so many tokens; returns what was known of it."""
        inside = self._let_out(request_id, now_s)
        self._shares.leave(request_id, token_cost(inside.work.num_prompt_tokens, num_output))
        return inside

    def _let_in(
        self, request_id: str, admitted: Admitted, num_prompt_tokens: int, now_s: float, tenant: Tenant
    ) -> RunningRequest:
        """Lets a request in, or replaces what is known of one that is; returns its work."""
        num_tokens = num_prompt_tokens + round(admitted.num_output)
        cost = token_cost(num_prompt_tokens, admitted.num_output)
        self._shares.enter(request_id, admitted.qos.priority, tenant, cost, num_tokens)
        before = self._inside.get(request_id)
        if before is not None:
            self.reservations.give_back(before.qos.name, before.reserved_tokens)
        self.reservations.take(admitted.qos.name, num_tokens)
        tbt_s = max(admitted.mean_tbt_s, admitted.placement.tbt_s)
        qos, num_output, seen = admitted.qos, admitted.num_output, admitted.most_seen
        level = qos.priority, qos.max_pause_s
        work = RunningRequest(num_prompt_tokens, num_output, tbt_s, admitted.priority, qos.tbt_target_s, *level, seen)
        context_tokens = min(num_prompt_tokens + num_output / 2, seen.answer)
        unloaded = self._forecast.unloaded_latency(admitted.placement, context_tokens, num_output)
        handover_s = admitted.placement.handover_s
        self._inside[request_id] = Inside(admitted.qos, work, num_tokens, unloaded, handover_s, now_s)
        return work

    def _let_out(self, request_id: str, now_s: float) -> Inside:
        inside = self._inside.pop(request_id)
        self._waiting.discard(request_id)
        self.reservations.give_back(inside.qos.name, inside.reserved_tokens)
        self._forecast.leave(request_id, now_s)
        return inside
