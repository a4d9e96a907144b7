"""The autopilot's slow loop: what the next minutes will bring, from the ledger's last hours."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from halfmoon.errors import HalfmoonError
from halfmoon.ledger.ledger import Ledger
from halfmoon.plan.traffic_outlook import Outlook, RecentTraffic
from halfmoon.policy.scaling.autopilot import Advice
from halfmoon.policy.scaling.observation import Observation
from halfmoon.policy.scaling.rules import ScalingRules
from services.planner.autopilot.outlook_process import request_outlook

log = logging.getLogger(__name__)

_EVERY_S = 120.0
_LOOKS_BACK = timedelta(hours=6)
_MOST_ROWS = 20_000
_WRONG = 0.5  # of the rate: a forecast that was so far off is not followed the next time

Ask = Callable[[RecentTraffic], Awaitable[Outlook | None]]


class SlowLoop:
    """Owns the latest outlook and the advice that follows from it.

    There is advice only where a method beats "as now" in back-tests, and its last forecast came about true; otherwise
    the fast loop's measurements are the better guess.
    """

    def __init__(
        self,
        ledger: Ledger,
        rules: ScalingRules,
        ask: Ask = request_outlook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._rules = rules
        self._ask = ask
        self._clock = clock
        self._latest: Outlook | None = None
        self._latest_at: datetime | None = None
        self._was_wrong = False
        self.advice: Advice | None = None

    async def run(self, seen: Callable[[], Observation | None]) -> None:
        """Looks ahead, forever, while there are requests."""
        while True:
            await asyncio.sleep(_EVERY_S)
            observation = seen()
            if observation is None:
                continue
            try:
                await self.once(observation)
            except HalfmoonError as error:
                self.advice = None
                log.warning("autopilot.no_outlook", extra={"reason": error.message})

    async def once(self, seen: Observation) -> None:
        """Looks ahead from what the ledger has. Raises HalfmoonError."""
        now = datetime.now(UTC)
        await self._ledger.join()
        rows = await self._ledger.traffic.since(now - _LOOKS_BACK, _MOST_ROWS)
        self._judge(sum(row.arrived_at >= self._latest_at for row in rows) if self._latest_at else 0, now)
        self._latest = None
        if not rows or rows[-1].arrived_at < now - 2 * timedelta(seconds=_EVERY_S):
            self.advice = None
            return
        recent = RecentTraffic(
            np.array([max((now - row.arrived_at).total_seconds(), 0.0) for row in rows]),
            np.array([row.prompt_tokens for row in rows], dtype=np.float64),
            np.array([row.output_tokens for row in rows], dtype=np.float64),
            seen.speed, seen.ttft_s, seen.tpot_s, self._rules.attainment, seen.split, self._rules.roles,
        )  # fmt: skip
        found = await self._ask(recent)
        self._latest, self._latest_at = found, now
        is_followed = found is not None and found.method != "last" and not self._was_wrong
        until_s = self._clock() + 1.5 * _EVERY_S
        self.advice = Advice(found.demand, found.target, until_s) if found is not None and is_followed else None

    @property
    def shown(self) -> dict[str, Any] | None:
        """The latest outlook, for the status."""
        found = self._latest
        if found is None:
            return None
        return {
            "rate_per_s": found.rate_per_s,
            "method": found.method,
            "error": found.error,
            "target": list(found.target),
            "attainment": found.attained,
            "is_followed": self.advice is not None,
        }

    def _judge(self, num_arrived: int, now: datetime) -> None:
        """Compares the last forecast with what came since."""
        if self._latest is None or self._latest_at is None:
            self._was_wrong = False
            return
        expected = self._latest.rate_per_s * (now - self._latest_at).total_seconds()
        self._was_wrong = abs(num_arrived - expected) > _WRONG * max(num_arrived, expected)
