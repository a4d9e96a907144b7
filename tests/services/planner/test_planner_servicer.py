"""The planner over a real loopback channel, its settings and its life as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest, NotFound
from halfmoon.ledger.ledger import Ledger, open_ledger
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.service import read_settings
from services.planner.fleet import Fleet
from services.planner.job_process import run_job
from services.planner.job_queue import JobQueue
from services.planner.jobs import Jobs
from services.planner.metrics import PlannerMetrics
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings


class Planner:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.stub = planner_pb2_grpc.PlannerStub(peer.channel)


@asynccontextmanager
async def planner(fleet: str | None = None) -> AsyncIterator[Planner]:
    async with (
        open_ledger("sqlite://") as ledger,
        running_server("127.0.0.1:0", [_servicer(ledger, fleet).register], PlannerMetrics().rpc, grace_s=0) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
    ):
        yield Planner(peer)


def _servicer(ledger: Ledger, fleet: str | None) -> PlannerServicer:
    jobs = Jobs(JobQueue(1, 0), 1.0, run_job)
    return PlannerServicer(ledger.plans, jobs, 1, Fleet(fleet))


@pytest.mark.parametrize(
    ("fleet", "error"),
    [(None, Incompatible), ("unix:/nowhere/fleet", NotFound)],
    ids=["no workers to change", "no plan"],
)
async def test_what_cannot_be_applied_is_known_beforehand_and_refused(
    fleet: str | None, error: type[HalfmoonError]
) -> None:
    request = planner_pb2.ApplyRequest(plan_id=7)
    async with planner(fleet) as it:
        told = await it.peer.call(it.stub.Catalogue, planner_pb2.CatalogueRequest(), deadline_s=30)
        assert told.can_apply == (fleet is not None)
        with pytest.raises(error):
            await it.peer.call(it.stub.PreviewApply, request, deadline_s=30)
        with pytest.raises(error):
            async with it.peer.stream(it.stub.Apply, request, deadline_s=30) as updates:
                await anext(updates)


def test_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HALFMOON_PLANNER_LISTEN", "127.0.0.1:7")
    assert read_settings(PlannerSettings, []).listen == "127.0.0.1:7"
    assert read_settings(PlannerSettings, ["--listen", "127.0.0.1:8"]).listen == "127.0.0.1:8"
    with pytest.raises(SystemExit):
        read_settings(PlannerSettings, ["--lissten", "x"])
    assert "--lissten" in capsys.readouterr().err
    with pytest.raises(InvalidRequest):
        read_settings(PlannerSettings, ["--metrics-port", "70000"])
    monkeypatch.setenv("HALFMOON_PLANNER_LISSTEN", "x")
    with pytest.raises(InvalidRequest, match="LISSTEN"):
        read_settings(PlannerSettings, [])


def test_the_program_says_ready_and_stops_cleanly(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "services.planner", "--metrics-port", "0", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            events = [json.loads(process.stderr.readline())]
            while events[-1]["event"] != "service.ready":
                events.append(json.loads(process.stderr.readline()))
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert events[0]["event"] == "service.settings"
    assert events[-1]["address"].startswith("127.0.0.1:")
    assert (process.returncode, rest) == (0, "")
