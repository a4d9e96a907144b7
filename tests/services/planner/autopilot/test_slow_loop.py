"""The slow loop: what it advises, and when it does not."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import psutil

from halfmoon.ledger.ledger import open_ledger
from halfmoon.plan.traffic_outlook import Outlook, RecentTraffic
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.observation import Observation, ObservedWorker, Split, Traffic, WorkerSpeed
from halfmoon.policy.scaling.pressure import Demand
from halfmoon.policy.scaling.rules import ScalingRules
from services.planner.autopilot.outlook_process import request_outlook
from services.planner.autopilot.slow_loop import SlowLoop
from tests.ledger.rows import row

SPEED = WorkerSpeed(PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7))
SEEN = Observation((ObservedWorker("p", "prefill"), ObservedWorker("d", "decode")), Traffic(), SPEED, 4.0)
FOUND = Outlook(Demand(1.0, 0.1, 10.0, 100.0), 2.0, "arima", 0.1, Split(1, 1), 0.99)


class Asked:
    """Answers with an outlook, and keeps what was asked."""

    def __init__(self, *answers: Outlook | None) -> None:
        self.answers = list(answers)
        self.recent: list[RecentTraffic] = []

    async def __call__(self, recent: RecentTraffic) -> Outlook | None:
        self.recent.append(recent)
        return self.answers.pop(0)


async def served(url: str, num: int) -> None:
    """Writes as many requests, the last of which came now."""
    now = datetime.now(UTC)
    async with open_ledger(url) as ledger:
        for number in range(num):
            ledger.record(row(number + 1, created_at=now - timedelta(seconds=num - number), prompt_tokens=9))


async def test_a_forecast_is_advice(tmp_path: Path) -> None:
    asked = Asked(FOUND, FOUND._replace(method="last"), None)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    await served(url, 3)
    async with open_ledger(url) as ledger:
        loop = SlowLoop(ledger, ScalingRules(), asked, lambda: 7.0)
        await loop.once(SEEN)
        assert loop.advice is not None
        assert (loop.advice.demand, loop.advice.target) == (FOUND.demand, Split(1, 1))
        assert loop.shown is not None
        assert (loop.shown["method"], loop.shown["is_followed"]) == ("arima", True)
        for _ in range(2):
            await loop.once(SEEN)
            assert loop.advice is None
    assert list(asked.recent[0].prompt_tokens) == [9.0, 9.0, 9.0]
    assert (np.diff(asked.recent[0].ages_s) < 0).all()


async def test_a_forecast_that_was_wrong_is_not_followed_the_next_time(tmp_path: Path) -> None:
    asked = Asked(FOUND._replace(rate_per_s=1e9), FOUND, FOUND)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    await served(url, 3)
    async with open_ledger(url) as ledger:
        loop = SlowLoop(ledger, ScalingRules(), asked)
        await loop.once(SEEN)
        await loop.once(SEEN)
        assert loop.advice is None


async def test_without_requests_there_is_nothing_to_ask(tmp_path: Path) -> None:
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        loop = SlowLoop(ledger, ScalingRules(), Asked())
        await loop.once(SEEN)
        assert (loop.advice, loop.shown) == (None, None)


def recent_traffic() -> RecentTraffic:
    """Requests alike, one a second for ten minutes."""
    num = 600
    return RecentTraffic(
        np.linspace(600, 1, num), np.full(num, 100.0), np.full(num, 10.0), SPEED, 4.0, np.inf, 0.9, Split(1, 1),
        ("prefill", "decode"),
    )  # fmt: skip


async def test_its_process_has_one_thread() -> None:
    others = set(psutil.Process().children())
    asked, most = asyncio.create_task(request_outlook(recent_traffic())), 0
    while not asked.done():
        for child in set(psutil.Process().children()) - others:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                most = max(most, child.num_threads())
        await asyncio.sleep(0.005)
    assert (most, await asked is None) == (1, False)


async def test_it_is_found_in_a_process_of_its_own() -> None:
    recent = recent_traffic()
    found = await request_outlook(recent)
    assert found is not None
    assert (found.method, found.target) == ("last", Split(1, 1))
    few = RecentTraffic(*(recent.ages_s[:2],) * 3, SPEED, 4.0, 0.1, 0.9, Split(1, 1), ("prefill", "decode"))
    assert await request_outlook(few) is None
