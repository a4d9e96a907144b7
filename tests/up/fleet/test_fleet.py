"""Workers that change while their supervisor runs: small Python programs, and the wire to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.errors import (
    Forbidden,
    HalfmoonError,
    Incompatible,
    InvalidRequest,
    NoCapacity,
    ServiceFailed,
    Unauthenticated,
)
from halfmoon.pb import planner_pb2
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import credential_from, new_secret
from halfmoon.up.fleet.fleet import WorkerFleet
from halfmoon.up.fleet.fleet_servicer import fleet_address, fleet_server
from halfmoon.up.fleet.from_plan import applied_options
from halfmoon.up.specs.worker_specs import WorkerSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor
from halfmoon.up.up_options import PreparedModel, UpOptions, WorkerStart
from services.planner.fleet import Fleet

JOIN = """
import json, signal, sys
def say(**event): print(json.dumps(event), flush=True)
def drained(*_): say(event="drained"); sys.exit(0)
signal.signal(signal.SIGUSR1, drained)
say(event="service.ready"); say(event="registration.welcome", gateway_id="g")
signal.pause()
"""
FAIL = 'print(\'{"level": "ERROR", "reason": "no such weights"}\'); raise SystemExit(1)'
SILENT = "import signal; signal.pause()"
PROGRAMS = {(): JOIN, ("fails",): FAIL, ("silent",): SILENT}
MODEL = PreparedModel("/models/m", "m")


def worker(planned: UpOptions, role: Role, index: int, start: WorkerStart, visible: Mapping[str, str]) -> WorkerSpec:
    arguments = ("-c", PROGRAMS[start.arguments])
    return WorkerSpec(f"{role}-{index}", arguments, visible, restarts=True, role=role, start=start)


def wanting(num_both: int, *arguments: str) -> UpOptions:
    starts: dict[Role, list[WorkerStart]] = {"both": [WorkerStart(arguments)] * num_both}
    return UpOptions(num_prefill=0, num_decode=0, num_both=num_both, worker_starts=starts)


class Host:
    """One prefill and one decode worker, and what was said of them."""

    def __init__(self, directory: Path) -> None:
        self.progress: list[tuple[str, int, int]] = []
        self.events: list[tuple[str, str]] = []
        self.boss = Supervisor(
            LogFiles(directory), lambda name, event: self.events.append((name, str(event.get("event"))))
        )
        specs = [worker(UpOptions(), role, 0, WorkerStart(), {}) for role in ("prefill", "decode")]
        self.specs = specs
        self.fleet = WorkerFleet(self.boss, specs, worker, {})

    async def change(self, planned: UpOptions, stop_first: bool = False) -> None:
        async with asyncio.timeout(60):
            await self.fleet.begin(planned, stop_first, lambda *said: self.progress.append(said))

    def roles_now(self) -> list[str]:
        change, _ = self.fleet.preview(wanting(1))
        return sorted(role for role, _ in change.now)


@asynccontextmanager
async def host(directory: Path) -> AsyncIterator[Host]:
    it = Host(directory)
    try:
        children = [await it.boss.start(spec) for spec in it.specs]
        watching = asyncio.create_task(it.boss.until_one_ends())
        await asyncio.gather(*(child.joined for child in children))
        yield it
        assert not watching.done(), "nothing that the fleet does is a failure of the whole"
        watching.cancel()
    finally:
        await it.fleet.close()
        await it.boss.stop()


async def test_new_workers_join_before_old_ones_drain(tmp_path: Path) -> None:
    async with host(tmp_path) as it:
        await it.change(wanting(2))
        assert it.roles_now() == ["both", "both"]
        assert it.progress[2:4] == [("starting", 2, 2), ("draining", 0, 2)]
        drained = [it.events.index((name, "drained")) for name in ("prefill-0", "decode-0")]
        welcomed = [
            at for at, (name, said) in enumerate(it.events) if "both" in name and said == "registration.welcome"
        ]
        assert len(welcomed) == 2
        assert max(welcomed) < min(drained)
        await it.change(wanting(1))  # and who was started so can be told to go
        assert it.roles_now() == ["both"]


@pytest.mark.parametrize("stop_first", [False, True])
async def test_when_a_new_one_does_not_join_the_old_ones_serve_on(tmp_path: Path, stop_first: bool) -> None:
    async with host(tmp_path) as it:
        with pytest.raises(ServiceFailed, match=r"both-\d ended with exit status 1[^$]*no such weights"):
            await it.change(wanting(1, "fails"), stop_first)
        assert it.roles_now() == ["decode", "prefill"]
        assert [name for name, said in it.events if said == "drained"].count("prefill-0") == stop_first


async def test_who_takes_too_long_to_join_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.up.fleet.fleet.JOIN_S", 0.1)
    async with host(tmp_path) as it:
        with pytest.raises(ServiceFailed, match="did not join"):
            await it.change(wanting(1, "silent"))
        assert it.roles_now() == ["decode", "prefill"]


async def test_what_operators_did_since_is_what_a_plan_changes(tmp_path: Path) -> None:
    async with host(tmp_path) as it:
        child = next(child for child in it.boss.children if child.spec.name == "decode-0")
        child.role = "prefill"
        assert it.roles_now() == ["prefill", "prefill"]
        await it.boss.retire("prefill-0")
        assert it.roles_now() == ["prefill"]
        assert [spec.name for spec in it.fleet.workers] == ["decode-0"]


async def test_one_worker_more_is_like_one_that_runs(tmp_path: Path) -> None:
    async with host(tmp_path) as it:
        async with asyncio.timeout(60):
            await it.fleet.begin_adding(UpOptions(), "decode", lambda *said: None)
        assert it.roles_now() == ["decode", "decode", "prefill"]
        for name in it.boss.names:
            await it.boss.retire(name)
        with pytest.raises(Incompatible, match="no worker runs"):
            it.fleet.begin_adding(UpOptions(), "decode", lambda *said: None)


async def test_one_change_at_a_time(tmp_path: Path) -> None:
    async with host(tmp_path) as it:
        it.fleet.begin(wanting(1, "silent"), False, lambda *said: None)
        with pytest.raises(NoCapacity, match="in progress"):
            await it.change(wanting(1))


async def test_the_planner_asks_for_it_over_its_socket(tmp_path: Path) -> None:
    ended: list[HalfmoonError | None] = []
    async with host(tmp_path) as it:
        with fleet_address() as address:
            secret = new_secret()
            there = Fleet(address, credential_from(secret, "planner"))
            access = CallAccess(credential_from(secret, "operator"))
            reads = {"two": wanting(2), "bad": wanting(1, "fails")}
            note = lambda change: ended.append(change.exception())  # noqa: E731
            async with fleet_server(address, it.fleet, UpOptions(), reads.__getitem__, note, access):
                for other, refused in ((None, Unauthenticated), (credential_from(secret, "operator"), Forbidden)):
                    with pytest.raises(refused):
                        await Fleet(address, other).preview("two")
                told = await there.preview("two")
                assert [(one.role, one.count) for one in told.now] == [("decode", 1), ("prefill", 1)]
                assert [(one.role, one.count) for one in told.then] == [("both", 2)]
                updates = [update async for update in there.change("two", stop_first=False)]
                with pytest.raises(ServiceFailed, match="no such weights"):
                    [update async for update in there.change("bad", stop_first=False)]
        assert updates[0].progress == planner_pb2.Progress(what="starting", total=2)
        assert updates[-1].applied == told
        assert [type(one) for one in ended] == [type(None), ServiceFailed]


async def test_without_a_fleet_the_planner_says_what_to_do_instead() -> None:
    assert not Fleet(None).can_change
    with pytest.raises(Incompatible, match="halfmoon up --plan"):
        await Fleet(None).preview("")


PLAIN = UpOptions()
PLAN = "model: MODEL\nhandover_codec: CODEC\ncluster: {workers: [{role: both, count: 2, tp: 2, max_running: 8}]}"


def applied(model: str = "m", codec: str = "raw", options: UpOptions = PLAIN) -> UpOptions:
    return applied_options(options, MODEL, PLAN.replace("MODEL", model).replace("CODEC", codec))


def test_a_plans_workers_take_the_place_of_those_of_the_options() -> None:
    options = applied(options=UpOptions(num_prefill=3, dtype="float16"))
    assert (options.num_prefill, options.num_decode, options.num_both, options.dtype) == (0, 0, 2, "float16")
    assert options.worker_starts["both"][0].num_gpus == 2
    assert options.worker_starts["both"][0].arguments[-2:] == ("--max-running", "8")


def test_what_needs_more_than_other_workers_is_refused() -> None:
    with pytest.raises(Incompatible, match="the plan is for 'other', and 'm' is served here"):
        applied(model="other")
    with pytest.raises(Incompatible, match="hands KV over as int8"):
        applied(codec="int8")
    assert applied(codec="int8", options=UpOptions(handover_codec="int8")).num_both == 2
    shared = "raw\ngateway: {max_prefill_degree: 4}"
    with pytest.raises(Incompatible, match="counts on max_prefill_degree 4, and the gateway was started with 1"):
        applied(codec=shared)
    running = UpOptions(settings={"gateway": {"max_prefill_degree": "4"}})
    assert applied(codec=shared, options=running).num_both == 2
    with pytest.raises(InvalidRequest, match=r"plan\.yaml is not a plan"):
        applied_options(UpOptions(), MODEL, "")
