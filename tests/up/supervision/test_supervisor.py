"""The supervisor with small Python programs as its services."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from halfmoon.background import running
from halfmoon.errors import ServiceFailed
from halfmoon.up.supervision.child import Child, ServiceSpec, children_ready
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.service_process import LocalProcess
from halfmoon.up.supervision.supervisor import Supervisor

READY = 'print(\'{"event": "service.ready", "address": "here:1"}\', flush=True)\n'
WAIT = "import sys; sys.stdin.read()\n"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)\n"


def spec(name: str, program: str) -> ServiceSpec:
    return ServiceSpec(name, ("-c", program), {"EXTRA": "1"})


@asynccontextmanager
async def supervisor(directory: Path, events: list[tuple[str, dict[str, Any]]]) -> AsyncIterator[Supervisor]:
    found = Supervisor(LogFiles(directory), lambda name, event: events.append((name, event)))
    try:
        yield found
    finally:
        await found.stop()


def local(child: Child) -> LocalProcess:
    assert isinstance(child.process, LocalProcess)
    return child.process


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which its new parent may reap late
    return False


def until_over(pid: int) -> None:
    """Returns once a killed process that is no child of this one, and cannot be waited for, is over."""
    while is_alive(pid):
        time.sleep(0.01)


async def test_ready_events_arrive_and_lines_are_kept(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    async with supervisor(tmp_path, events) as boss:
        child = await boss.start(spec("one", "print('plain', flush=True)\n" + READY + WAIT))
        (ready,) = await children_ready([child])
        assert ready["address"] == "here:1"
    assert (tmp_path / "one.log").read_text().splitlines()[0] == "plain"
    assert events[0][0] == "one"


async def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    async with supervisor(tmp_path, []) as boss:
        await boss.start(spec("lasting", READY + WAIT))
        await boss.start(
            spec("broken", 'print(\'{"level": "ERROR", "reason": "no such model"}\'); raise SystemExit(3)')
        )
        with pytest.raises(ServiceFailed, match=r"broken ended with exit status 3[^$]*no such model"):
            await boss.until_one_ends()


async def test_a_child_started_later_is_watched_too(tmp_path: Path) -> None:
    async with supervisor(tmp_path, []) as boss:
        await boss.start(spec("lasting", READY + WAIT))
        watching = asyncio.ensure_future(boss.until_one_ends())
        await asyncio.sleep(0)
        await boss.start(spec("late", "raise SystemExit(7)"))
        with pytest.raises(ServiceFailed, match="late ended with exit status 7"):
            await watching


async def test_a_child_and_its_successor_inherit_descriptors(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        program = f"import os; os.write({writing}, b'x')\n" + READY
        async with supervisor(tmp_path, []) as boss:
            await boss.start(ServiceSpec("heir", ("-c", program), {}, restarts=True, descriptors=(writing,)))
            watching = asyncio.ensure_future(boss.until_one_ends())
            assert await asyncio.to_thread(os.read, reading, 1) == b"x"
            assert await asyncio.to_thread(os.read, reading, 1) == b"x"
            watching.cancel()
    finally:
        os.close(reading)
        os.close(writing)


async def test_stop_leaves_nobody_alive_even_who_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.up.supervision.supervisor.STOP_GRACE_S", 0.2)
    async with supervisor(tmp_path, []) as boss:
        children = [await boss.start(spec(f"stubborn-{index}", STUBBORN)) for index in range(2)]
        await children_ready(children)
    assert not any(is_alive(child.process.pid) for child in children)


def leaving(path: str, name: str) -> str:
    """A service that notes its name in a file when it is told to stop, in the order of the ends."""
    note = f"def end(*_):\n  with open('{path}', 'a') as file: file.write('{name} ')\n  raise SystemExit(0)\n"
    return "import signal\n" + note + "signal.signal(signal.SIGTERM, end)\n" + READY + "signal.pause()\n"


async def test_services_that_drain_end_before_the_others(tmp_path: Path) -> None:
    order = tmp_path / "order"
    async with supervisor(tmp_path, []) as boss:
        workers = [await boss.start(spec(f"worker-{index}", leaving(str(order), "worker"))) for index in range(2)]
        drains = replace(spec("gateway", leaving(str(order), "gateway")), drain_s=60.0)
        await children_ready([*workers, await boss.start(drains)])
    assert order.read_text().split() == ["gateway", "worker", "worker"]


async def test_a_kill_ends_even_a_drain(tmp_path: Path) -> None:
    async with supervisor(tmp_path, []) as boss:
        children = [await boss.start(replace(spec("gateway", STUBBORN), drain_s=3600.0))]
        children.append(await boss.start(spec("worker", READY + WAIT)))
        await children_ready(children)
        stopping = asyncio.ensure_future(boss.stop())
        await asyncio.sleep(0)
        boss.kill()
        async with asyncio.timeout(60):
            await stopping
    assert not any(is_alive(child.process.pid) for child in children)


async def test_lines_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    """A full disk under the state directory once ended the whole system."""
    (tmp_path / "logs").touch()  # no file can be made below it
    sentences: list[str] = []
    boss = Supervisor(LogFiles(tmp_path / "logs", on_trouble=sentences.append), lambda name, event: None)
    try:
        child = await boss.start(spec("one", "print('plain', flush=True)\n" + READY + WAIT))
        await children_ready([child])
        assert is_alive(child.process.pid)
    finally:
        await boss.stop()
    assert len(sentences) == 1


async def test_very_long_lines_do_not_end_the_watch(tmp_path: Path) -> None:
    async with supervisor(tmp_path, []) as boss:
        child = await boss.start(spec("wordy", "print('x' * 1_000_000, flush=True)\n" + READY + WAIT))
        await children_ready([child])
    assert (tmp_path / "wordy.log").stat().st_size > 1_000_000


class Restarts:
    """Notes why and after how long a wait; `enough` is set at the `most`th."""

    def __init__(self, most: int) -> None:
        self.reasons: list[str] = []
        self.waits_s: list[float] = []
        self.enough = asyncio.Event()
        self._most = most

    def note(self, why: str, wait_s: float) -> None:
        self.reasons.append(why)
        self.waits_s.append(wait_s)
        if len(self.reasons) == self._most:
            self.enough.set()


async def test_who_dies_is_started_again_after_ever_longer_waits(tmp_path: Path) -> None:
    """Also where it does not become ready again: it was once. A service beside it does not notice."""
    restarts = Restarts(5)
    dying = f"import os; first = not os.path.exists('{tmp_path}/once'); open('{tmp_path}/once', 'w')\n"
    dying += f"if first: {READY}raise SystemExit(4)"
    boss = Supervisor(LogFiles(tmp_path), lambda name, event: None, restarts.note, restart_s=(0.0005, 0.001, 0.002))
    try:
        lasting = await boss.start(spec("lasting", READY + WAIT))
        await children_ready([lasting])
        await boss.start(ServiceSpec("worker", ("-c", dying), {}, restarts=True))
        watching = asyncio.ensure_future(boss.until_one_ends())
        await asyncio.wait(
            {watching, asyncio.ensure_future(restarts.enough.wait())}, timeout=60, return_when="FIRST_COMPLETED"
        )
        assert not watching.done()
        watching.cancel()
        assert is_alive(lasting.process.pid)
    finally:
        await boss.stop()
    assert restarts.waits_s == [0.0005, 0.001, 0.002, 0.002, 0.002]
    assert all("exit status 4" in one for one in restarts.reasons)
    assert (tmp_path / "worker.log").read_text().count("service.ready") == 1


TEMPLATE = """
import json, os, sys
from halfmoon.rpc.processes.template_process import fork_service
from halfmoon.rpc.telemetry.logs import configure_logs
configure_logs("demo")
fork_service()
print(json.dumps({"event": "service.ready", "pid": os.getpid()}), flush=True)
sys.stdin.read()
"""


async def killed_alone(template: Child) -> None:
    """Kills a template. `wait` would wait for its child, too, which holds its pipes."""
    template.process.kill()
    while local(template).returncode is None:  # noqa: ASYNC110  # nothing else says it
        await asyncio.sleep(0)


class Serving:
    """The process ids in `service.ready` events."""

    def __init__(self) -> None:
        self.pids: asyncio.Queue[int] = asyncio.Queue()

    def note(self, name: str, event: dict[str, Any]) -> None:
        if event.get("event") == "service.ready":
            self.pids.put_nowait(event["pid"])


async def test_a_place_that_is_killed_ten_times_is_back_each_time_from_one_template(tmp_path: Path) -> None:
    serving, restarts = Serving(), Restarts(10)
    boss = Supervisor(LogFiles(tmp_path), serving.note, restarts.note)
    try:
        child = await boss.start(ServiceSpec("worker", ("-c", TEMPLATE), {}, restarts=True))
        async with running(boss.until_one_ends()), asyncio.timeout(60):
            for _ in range(10):
                os.kill(await serving.pids.get(), signal.SIGKILL)
            await serving.pids.get()
        assert local(child).returncode is None
    finally:
        await boss.stop()
    assert restarts.waits_s == [0.0] * 10
    assert set(restarts.reasons) == {"worker ended with SIGKILL"}


def drained(*, returns: bool, program: str = TEMPLATE) -> str:
    """A service that has drained, and ends. The next of its kind serves on."""
    said = f"print(json.dumps({{'event': 'worker.drained', 'returns': {returns}}}), flush=True)"
    once = f"once = 'drained'\nif not os.path.exists(once):\n open(once, 'w')\n {said}\n raise SystemExit(0)\n"
    return program.replace("sys.stdin.read()", once + "sys.stdin.read()")


PLAIN = "import json, os, sys\n" + "".join(line for line in TEMPLATE.splitlines(True) if "service.ready" in line)


@pytest.mark.parametrize("program", [TEMPLATE, PLAIN + "sys.stdin.read()\n"])
@pytest.mark.parametrize("returns", [True, False])
async def test_a_drained_service_is_started_again_only_if_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool, program: str
) -> None:
    monkeypatch.chdir(tmp_path)
    serving, restarts = Serving(), Restarts(1)
    boss = Supervisor(LogFiles(tmp_path), serving.note, restarts.note)
    try:
        await boss.start(spec("lasting", READY.replace('here:1"', 'here:1", "pid": 0') + WAIT))
        assert await serving.pids.get() == 0
        arguments = ("-c", drained(returns=returns, program=program))
        child = await boss.start(ServiceSpec("worker", arguments, {}, restarts=True))
        async with running(boss.until_one_ends()) as watching, asyncio.timeout(60):
            first = await serving.pids.get()
            if returns:
                assert await serving.pids.get() != first
                assert boss.names == {"lasting", "worker"}
            else:
                await child.ended
                while "worker" in boss.names:  # noqa: ASYNC110  # nothing else says it
                    await asyncio.sleep(0)
            assert not watching.done()
    finally:
        await boss.stop()
    assert restarts.waits_s == [0.0] * returns


async def test_a_service_whose_template_is_killed_serves_on_and_starts_cold_when_it_is_killed(tmp_path: Path) -> None:
    serving, restarts = Serving(), Restarts(1)
    boss = Supervisor(LogFiles(tmp_path), serving.note, restarts.note)
    try:
        child = await boss.start(ServiceSpec("worker", ("-c", TEMPLATE), {}, restarts=True))
        async with running(boss.until_one_ends()) as watching, asyncio.timeout(60):
            first = await serving.pids.get()
            await killed_alone(child)
            assert is_alive(first)
            assert not restarts.reasons
            os.kill(first, signal.SIGKILL)
            second = await serving.pids.get()
            os.kill(second, signal.SIGKILL)
            await serving.pids.get()
            assert not watching.done()
        assert restarts.waits_s == [0.0, 0.0]
        assert restarts.reasons[1] == "worker ended with SIGKILL", "by a new template"
    finally:
        await boss.stop()


async def test_a_service_without_its_template_ends_with_the_others(tmp_path: Path) -> None:
    serving = Serving()
    boss = Supervisor(LogFiles(tmp_path), serving.note)
    child = await boss.start(ServiceSpec("worker", ("-c", TEMPLATE), {}, restarts=True))
    async with asyncio.timeout(60):
        pid = await serving.pids.get()
        await killed_alone(child)
        await boss.stop()
        await asyncio.to_thread(until_over, pid)


async def test_a_template_whose_child_is_killed_before_it_served_ends(tmp_path: Path) -> None:
    boss = Supervisor(LogFiles(tmp_path), lambda name, event: None)
    dying = TEMPLATE.replace("print(", "os.kill(os.getpid(), 9)\nprint(")
    try:
        await boss.start(ServiceSpec("worker", ("-c", dying), {}, restarts=True))
        with pytest.raises(ServiceFailed, match="exit status -9"):
            async with asyncio.timeout(60):
                await boss.until_one_ends()
    finally:
        await boss.stop()


async def test_nobody_is_started_after_the_stop(tmp_path: Path) -> None:
    restarts = Restarts(1)
    boss = Supervisor(LogFiles(tmp_path), lambda name, event: None, restarts.note, restart_s=(3600.0,))
    await boss.start(ServiceSpec("worker", ("-c", READY + "raise SystemExit(4)"), {}, restarts=True))
    watching = asyncio.ensure_future(boss.until_one_ends())
    async with asyncio.timeout(60):
        await restarts.enough.wait()
        await boss.stop()
    watching.cancel()
    assert (tmp_path / "worker.log").read_text().count("service.ready") == 1


@pytest.mark.parametrize("announces", [True, False], ids=["which says when it is ready", "which never says it"])
async def test_a_service_that_never_was_ready_ends_everything(tmp_path: Path, announces: bool) -> None:
    restarts = Restarts(1)
    boss = Supervisor(LogFiles(tmp_path), lambda name, event: None, restarts.note)
    try:
        await boss.start(ServiceSpec("worker", ("-c", "raise SystemExit(4)"), {}, restarts=True, announces=announces))
        with pytest.raises(ServiceFailed, match="exit status 4"):
            await boss.until_one_ends()
    finally:
        await boss.stop()
    assert not restarts.reasons


REFUSED = 'print(\'{"event": "registration.refused", "level": "ERROR", "reason": "another model"}\', flush=True)\n'
WELCOME = 'print(\'{"event": "registration.welcome", "gateway_id": "g"}\', flush=True)\n'


async def test_a_worker_that_no_gateway_takes_ends_everything_and_says_why(tmp_path: Path) -> None:
    restarts = Restarts(1)
    boss = Supervisor(LogFiles(tmp_path), lambda name, event: None, restarts.note)
    try:
        await boss.start(ServiceSpec("worker", ("-c", READY + REFUSED + "raise SystemExit(4)"), {}, restarts=True))
        with pytest.raises(ServiceFailed, match=r"exit status 4[^$]*another model"):
            await boss.until_one_ends()
    finally:
        await boss.stop()
    assert not restarts.reasons


async def until_restarted_twice(directory: Path, spec: ServiceSpec) -> None:
    restarts = Restarts(2)
    boss = Supervisor(LogFiles(directory), lambda name, event: None, restarts.note, restart_s=(0.0,))
    try:
        await boss.start(spec)
        watching = asyncio.ensure_future(boss.until_one_ends())
        async with asyncio.timeout(60):
            await restarts.enough.wait()
        watching.cancel()
    finally:
        await boss.stop()


async def test_a_worker_that_was_taken_before_a_gateway_refuses_it_is_started_again(tmp_path: Path) -> None:
    program = READY + WELCOME + REFUSED + "raise SystemExit(4)"
    await until_restarted_twice(tmp_path, ServiceSpec("worker", ("-c", program), {}, restarts=True))


async def test_a_silent_service_that_has_lived_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.up.supervision.child._SILENT_READY_S", 0.0)
    silent = ServiceSpec("console", ("-c", "raise SystemExit(4)"), {}, restarts=True, announces=False)
    await until_restarted_twice(tmp_path, silent)


async def test_an_interpreter_that_is_not_there_is_told_at_the_first_start(tmp_path: Path) -> None:
    boss = Supervisor(LogFiles(tmp_path), lambda name, event: None)
    with pytest.raises(ServiceFailed, match=r"one could not be started: .*nowhere"):
        await boss.start(replace(spec("one", WAIT), python="/nowhere/python"))
    await boss.stop()
