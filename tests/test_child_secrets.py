"""Three processes start others: none of these sees a secret that it does not read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor
from services.gateway.sandbox.sandbox_process import SandboxProcess
from services.planner.job import PlanJob
from services.planner.job_process import run_job
from services.planner.wire import plan_request
from tests.services.planner.test_planner_jobs import ASKED

SECRETS = (
    *("HALFMOON_CLUSTER_SECRET", "HALFMOON_OPERATOR_TOKEN", "HALFMOON_API_KEYS", "HALFMOON_GATEWAY_API_KEY"),
    *("HALFMOON_PLANNER_LEDGER_URL", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"),
)


@asynccontextmanager
async def child_of_up(directory: Path) -> AsyncIterator[None]:
    supervisor = Supervisor(LogFiles(directory), lambda name, event: None)
    await supervisor.start(ServiceSpec("one", ("-c", "import sys; sys.stdin.read()"), {}))
    yield
    await supervisor.stop()


@asynccontextmanager
async def constraint_check(directory: Path) -> AsyncIterator[None]:
    process = await SandboxProcess.start()
    yield
    await process.end()


@asynccontextmanager
async def planner_job(directory: Path) -> AsyncIterator[None]:
    async with aclosing(run_job(PlanJob(plan_request(ASKED), 1, with_curves=True), {})) as updates:
        await anext(updates)
        yield


@pytest.mark.parametrize("started", [child_of_up, constraint_check, planner_job])
async def test_a_child_sees_no_secret_of_its_parent(
    started: Callable[[Path], AbstractAsyncContextManager[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("HALFMOON_PLAIN", "plain")
    before = set(psutil.Process().children())
    async with started(tmp_path):
        (child,) = set(psutil.Process().children()) - before
        environment = child.environ()
    assert environment["HALFMOON_PLAIN"] == "plain"
    assert "a-secret" not in environment.values()
