"""The autopilot's decisions in the ledger: each once, with what was predicted, and later what was measured."""

from __future__ import annotations

import logging
from collections import deque
from datetime import UTC, datetime
from typing import NamedTuple

from halfmoon.errors import Unavailable
from halfmoon.ledger.history.autopilot_decisions import AutopilotDecisions, StoredDecision
from halfmoon.ledger.ledger import Ledger
from halfmoon.policy.scaling.autopilot import Decision
from halfmoon.policy.scaling.observation import Traffic

log = logging.getLogger(__name__)

_MEASURED_S = 20.0  # after a decision: until then its effect is there, and what was late before has left the window
_NEWS_S = 30.0  # advice that was not given for as long is news again
_MAX_PRESSURE = 999.0  # where nobody serves a phase, it is infinite
_MAX_WAITING = 256


class _Waiting(NamedTuple):
    number: int
    due_s: float


class DecisionLog:
    """Owns which decisions wait to be measured, and what was said last. Rows are lost while the ledger is away."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: deque[_Waiting] = deque(maxlen=_MAX_WAITING)
        self._said: tuple[object, ...] = ()
        self._said_s = 0.0

    def is_news(self, decision: Decision, mode: str, now_s: float) -> bool:
        """Whether this is to be written: what is only advised again and again, or still cannot be met, is not."""
        if decision.action == "hold":
            return False
        said = (mode, decision.action, decision.role, decision.split, decision.target)
        is_said = said == self._said and now_s < self._said_s + _NEWS_S
        self._said, self._said_s = said, now_s
        return not is_said

    async def add(
        self, decision: Decision, mode: str, outcome: str, before: str, traffic: Traffic, now_s: float
    ) -> None:
        """Writes a decision; `before` is the role of its worker."""
        values = StoredDecision(
            datetime.now(UTC), mode, decision.action, decision.reason[:256], decision.worker_id, before,
            decision.role or "", str(decision.split), str(decision.target), decision.num_needed,
            _finite(decision.pressure.prefill), _finite(decision.pressure.decode),
            _finite(decision.predicted.prefill), _finite(decision.predicted.decode),
            attainment_of(traffic), outcome[:256],
        )  # fmt: skip
        log.info("autopilot.decided", extra={name: str(value) for name, value in values._asdict().items()})
        try:
            number = await (await self._rows()).add(values)
        except Unavailable as error:
            log.error("autopilot.not_kept", extra={"reason": error.message})
            return
        self._waiting.append(_Waiting(number, now_s + _MEASURED_S))

    async def measure(self, now: Decision, traffic: Traffic, now_s: float) -> None:
        """Writes what has become of the decisions that are due."""
        while self._waiting and self._waiting[0].due_s <= now_s:
            number = self._waiting.popleft().number
            figures = _finite(now.pressure.prefill), _finite(now.pressure.decode), attainment_of(traffic)
            try:
                await (await self._rows()).measured(number, datetime.now(UTC), *figures)
            except Unavailable as error:
                log.error("autopilot.not_kept", extra={"reason": error.message})

    async def _rows(self) -> AutopilotDecisions:
        await self._ledger.join()
        return self._ledger.autopilot_decisions


def attainment_of(traffic: Traffic) -> float | None:
    """The lesser share of ended requests that met either target; None where none ended."""
    return min(traffic.num_in_ttft, traffic.num_in_tpot) / traffic.num_ended if traffic.num_ended else None


def _finite(pressure: float) -> float:
    return min(pressure, _MAX_PRESSURE)
