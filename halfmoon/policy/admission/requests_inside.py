"""The requests that admission has let in: their work, the reserved tokens they use, and whose turn has come."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from halfmoon.policy.admission.degradation import Admitted
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.reservations import Reservations
from halfmoon.policy.forecast.request_forecast import RunningRequest
from halfmoon.policy.values import UnloadedLatency


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
    """Owns the requests inside, and the use of reservations that follows from them. Knows nothing of workers."""

    def __init__(self) -> None:
        self.reservations = Reservations()
        self._inside: dict[str, Inside] = {}
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        return len(self._inside)

    def __getitem__(self, request_id: str) -> Inside:
        return self._inside[request_id]

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
        admitted: Admitted,
        num_prompt_tokens: int,
        unloaded: UnloadedLatency,
        now_s: float,
        *,
        waits: bool = False,
    ) -> RunningRequest:
        """Lets a request in, or replaces what is known of one that is; returns its work."""
        before = self._inside.get(request_id)
        if before is not None:
            self.reservations.give_back(before.qos.name, before.reserved_tokens)
        num_tokens = num_prompt_tokens + round(admitted.num_output)
        self.reservations.take(admitted.qos.name, num_tokens)
        tbt_s = max(admitted.mean_tbt_s, admitted.placement.tbt_s)
        target_s = math.inf if admitted.qos.tbt_s is None else admitted.qos.tbt_s
        work = RunningRequest(num_prompt_tokens, admitted.num_output, tbt_s, admitted.priority, target_s)
        handover_s = admitted.placement.handover_s
        self._inside[request_id] = Inside(admitted.qos, work, num_tokens, unloaded, handover_s, now_s)
        if waits:
            self._waiting.add(request_id)
        else:
            self._waiting.discard(request_id)
        return work

    def leave(self, request_id: str) -> Inside:
        """Removes a request and returns what was known of it."""
        inside = self._inside.pop(request_id)
        self._waiting.discard(request_id)
        self.reservations.give_back(inside.qos.name, inside.reserved_tokens)
        return inside
