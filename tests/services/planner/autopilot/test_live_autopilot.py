"""The autopilot against a real gateway with fake workers: it sees, advises, acts when told, and writes it down."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon.background import running
from halfmoon.config.planner import AutopilotMode
from halfmoon.errors import Unavailable
from halfmoon.ledger.history.autopilot_decisions import StoredDecision
from halfmoon.ledger.ledger import open_ledger
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.autopilot import Autopilot
from halfmoon.policy.scaling.observation import Observation, Traffic, WorkerSpeed
from halfmoon.policy.scaling.rules import ScalingRules
from halfmoon.policy.view.worker_view import Role
from services.gateway.telemetry.observed_cluster import ObservedTraffic
from services.planner.autopilot import live_autopilot
from services.planner.autopilot.actuators import Actuators
from services.planner.autopilot.decision_log import DecisionLog
from services.planner.autopilot.gateways import open_gateways
from services.planner.autopilot.live_autopilot import LiveAutopilot
from services.planner.autopilot.slow_loop import SlowLoop
from services.planner.fleet import Fleet as WorkerStarts
from services.planner.metrics import AutopilotMetrics
from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_access import ask

SPEED = WorkerSpeed(PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7), 64, 200_000)
PROMPTS = Traffic(8.0, 20, 20.0, 20, 10, 20)  # 2.5 s of work a second, half of them late


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class FakeStarts(WorkerStarts):
    """A `halfmoon up` that starts nothing."""

    def __init__(self) -> None:
        super().__init__("unix:/nowhere")
        self.added: list[str] = []
        self.is_failing = False

    async def add(self, role: Role) -> None:
        if self.is_failing:
            raise Unavailable("no room")
        self.added.append(role)


@dataclass
class Live:
    """A gateway with two prefill and four decode workers, and the autopilot beside it."""

    fleet: Fleet
    autopilot: LiveAutopilot
    clock: Clock
    url: str
    metrics: CollectorRegistry
    workers: FakeStarts

    async def roles(self) -> dict[str, str]:
        workers = (await ask(self.fleet, "GET", "/halfmoon/v1/cluster"))[2]["workers"]
        return {worker["worker_id"]: worker["role"] for worker in workers}

    async def decisions(self) -> list[StoredDecision]:
        async with open_ledger(self.url) as ledger:
            return list(await ledger.autopilot_decisions.newest(99))


@asynccontextmanager
async def live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: AutopilotMode, traffic: Traffic = PROMPTS, **bounds: Any
) -> AsyncIterator[Live]:
    observation = ObservedTraffic.observation

    def busy(self: ObservedTraffic, members: object, seconds: int, now_s: float) -> Observation:
        seen = observation(self, members, seconds, now_s)  # type: ignore[arg-type]
        return replace(seen, traffic=traffic, speed=SPEED, ttft_s=4.0, tpot_s=0.1)

    monkeypatch.setattr(ObservedTraffic, "observation", busy)
    clock, url, registry = Clock(), f"sqlite:///{tmp_path / 'ledger.db'}", CollectorRegistry()
    rules = ScalingRules(dwell_s=0.0, **bounds)
    async with running_fleet(tmp_path, role_dwell_s=0.0) as fleet:
        await fleet.pair()
        await fleet.add("p1", "prefill")
        for name in ("d1", "d2", "d3"):
            await fleet.add(name, "decode")
        async with (
            open_ledger(url) as ledger,
            open_gateways([fleet.http], None, tmp_path, None, rules.window_s) as gateways,
        ):
            log, metrics, workers = DecisionLog(ledger), AutopilotMetrics(registry), FakeStarts()
            actuators = Actuators(gateways, workers)
            slow_loop = SlowLoop(ledger, rules)
            autopilot = LiveAutopilot(Autopilot(rules), mode, gateways, actuators, log, slow_loop, metrics, clock)
            yield Live(fleet, autopilot, clock, url, registry, workers)
            await actuators.close()


async def test_it_says_once_what_it_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(tmp_path, monkeypatch, "observe") as it:
        before = await it.roles()
        for _ in range(3):
            decision = await it.autopilot.once()
            it.clock.now_s += 1.0
            assert (decision.action, decision.role) == ("change_role", "prefill")
        assert await it.roles() == before
        (row,) = await it.decisions()
        shown = (await ask(it.fleet, "GET", "/halfmoon/v1/autopilot"))[2]
    assert (row.mode, row.outcome, row.before, row.after) == ("observe", "advised", "decode", "prefill")
    assert (row.split, row.target, row.attainment) == ("2:4:0", "5:1:0", 0.5)
    assert row.predicted_prefill < row.prefill
    assert (shown["mode"], shown["status"]["outcome"], len(shown["decisions"])) == ("observe", "advised", 1)


async def test_figures_that_json_does_not_have_are_sent_as_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlook = {"rate": math.nan, "best": {"attainment": -math.inf, "split": "1:1"}}
    monkeypatch.setattr(SlowLoop, "shown", property(lambda self: outlook))
    async with live(tmp_path, monkeypatch, "observe") as it:
        await it.autopilot.once()
        await it.autopilot.once()  # shows the gateway the status of the first one
        shown = (await ask(it.fleet, "GET", "/halfmoon/v1/autopilot"))[2]
    assert shown["status"]["outlook"] == {"rate": None, "best": {"attainment": None, "split": "1:1"}}


async def test_it_acts_when_told_and_measures_what_came_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(tmp_path, monkeypatch, "observe") as it:
        await ask(it.fleet, "PUT", "/halfmoon/v1/autopilot", json={"mode": "act"})
        decision = await it.autopilot.once()
        assert (await it.roles())[decision.worker_id] == "prefill"
        it.clock.now_s += 30.0
        await it.autopilot.once()
        row = (await it.decisions())[-1]
        changes = (await ask(it.fleet, "GET", "/halfmoon/v1/worker_changes"))[2]
        figures = generate_latest(it.metrics).decode()
    assert (row.mode, row.outcome) == ("act", "done")
    assert row.measured_at is not None
    assert row.measured_prefill == pytest.approx(row.predicted_prefill)
    assert changes[-1]["changed_by"] == "autopilot"
    assert 'halfmoon_autopilot_mode{mode="act"} 1.0' in figures
    assert 'halfmoon_autopilot_decisions_total{action="change_role",mode="act"}' in figures


async def test_what_a_person_has_changed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(tmp_path, monkeypatch, "act") as it:
        await it.autopilot.once()
        changed = {name for name, role in (await it.roles()).items() if name[0] == "d" and role == "prefill"}
        it.clock.now_s += 5.0
        for name in {"d0", "d1", "d2", "d3"} - changed:
            for role in ("both", "decode"):
                body = {"role": role, "by": "ann", "force": True}
                assert (await ask(it.fleet, "POST", f"/halfmoon/v1/workers/{name}/role", json=body))[0] == 200
        before = await it.roles()
        decision = await it.autopilot.once()
        assert (decision.action, await it.roles()) == ("hold", before)


async def test_off_means_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(tmp_path, monkeypatch, "off") as it:
        before = await it.roles()
        await it.autopilot.once()
        assert (await it.roles(), await it.decisions()) == (before, [])


async def test_a_gateway_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(tmp_path, monkeypatch, "act") as it:
        await it.fleet.stop()
        with pytest.raises(Unavailable):
            await it.autopilot.once()


@pytest.mark.parametrize(("has_looked", "level"), [(False, "WARNING"), (True, "ERROR")])
async def test_an_outage_is_an_error_once_a_gateway_was_there(
    has_looked: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Services start in any order."""
    looks, has_failed_twice = iter(range(4)), asyncio.Event()

    async def once(self: LiveAutopilot) -> None:
        number = next(looks, 4)
        if number == 3:
            has_failed_twice.set()
        if number or not has_looked:
            raise Unavailable("away")

    monkeypatch.setattr(live_autopilot, "_EVERY_S", 0.01)
    monkeypatch.setattr(LiveAutopilot, "once", once)
    async with live(tmp_path, monkeypatch, "off") as it, running(it.autopilot.run()), asyncio.timeout(30):
        await has_failed_twice.wait()
    assert [record.levelname for record in caplog.records if record.message == "autopilot.blind"] == [level]


async def test_it_starts_a_worker_where_no_roles_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = PROMPTS._replace(work_s=80.0)
    async with live(tmp_path, monkeypatch, "act", flood, max_workers=7, patience_s=2.0) as it:
        for _ in range(20):
            await it.autopilot.once()
            it.clock.now_s += 1.0
        rows = await it.decisions()
    more = [(row.outcome, row.after) for row in rows if row.action == "add_worker"]
    assert more == [("started", "prefill")]
    assert it.workers.added == ["prefill"]


async def test_it_lets_an_idle_worker_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(tmp_path, monkeypatch, "act", Traffic(8.0), max_workers=6, min_workers=5, idle_s=2.0) as it:
        for _ in range(6):
            await it.autopilot.once()
            it.clock.now_s += 1.0
        (row,) = await it.decisions()
        placeable = it.fleet.placeable()
    assert (row.action, row.outcome, row.before) == ("remove_worker", "drained", row.after)
    assert row.worker_id not in placeable
