"""Starts the services of one host as child processes, watches them, and stops them all.

Children run in sessions of their own, so that Ctrl-C reaches only this process. Their log lines arrive by pipe and are
copied to files. The supervisor reads the few events it acts on (`service.ready`, `weights.progress`) from them. Each
child's stdin is a pipe from this process: if this process is killed, the children see the pipe close, and stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.background import cancelled
from halfmoon.errors import ServiceFailed
from halfmoon.rpc.server import SUPERVISED_ENV

STOP_GRACE_S = 3.5  # from SIGTERM to SIGKILL; the whole stop takes at most five seconds

_TAIL_LINES = 15
_RESTART_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # waits before successive restarts; the last one repeats
_SETTLED_S = 60.0  # a child that lived this long starts again at the first wait
_SILENT_READY_S = 10.0

OnEvent = Callable[[str, dict[str, Any]], None]
OnRestart = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One child: its unique name, also that of its log file, its arguments to Python and its additional environment.

    `restarts`: a child that has been ready is started again whenever it ends on its own.
    `announces`: it logs `service.ready`. A child that does not counts as ready after ten seconds.
    `num_gateways`: the number of gateways that must welcome it before it has joined.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    restarts: bool = False
    announces: bool = True
    num_gateways: int = 1
    metrics_port: int | None = None  # where Prometheus finds it
    descriptors: tuple[int, ...] = ()  # of this process, which the child inherits under the same numbers


class Child:
    """Owns one child process, its log file and its announcements.

    An expendable child, on trial or being retired, may end without failure or restart.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        process: asyncio.subprocess.Process,
        log_path: Path,
        on_event: OnEvent,
        is_expendable: bool = False,
    ) -> None:
        self.spec = spec
        self.process = process
        self.is_expendable = is_expendable
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[ServiceFailed] = asyncio.get_running_loop().create_future()
        self.started_s = asyncio.get_running_loop().time()
        self._log_path = log_path
        self._on_event = on_event
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._welcomed_by: set[Any] = set()

    async def watch(self) -> None:
        """Copies the child's lines to its log until it ends, then raises ServiceFailed."""
        assert self.process.stdout is not None
        with self._log_path.open("ab", buffering=0) as log_file:
            async for line in _lines(self.process.stdout):
                log_file.write(line)
                self._read(line.decode(errors="replace").rstrip())
        code = await self.process.wait()
        failure = ServiceFailed(
            f"{self.spec.name} ended with exit status {code}{self._why()}\nIts log: {self._log_path}"
        )
        self.ended.set_result(failure)
        raise failure

    def _read(self, line: str) -> None:
        event: Any = None
        with suppress(ValueError):
            event = json.loads(line)
        if not isinstance(event, dict):
            self._tail.append(line)
            return
        if event.get("event") == "service.ready" and not self.ready.done():
            self.ready.set_result(event)
        if event.get("event") == "registration.welcome":
            self._welcome(event)
        if event.get("level") in ("ERROR", "CRITICAL"):
            self._tail.append(str(event.get("reason") or event.get("exc_info") or event.get("event")))
        self._on_event(self.spec.name, event)

    def _welcome(self, event: dict[str, Any]) -> None:
        self._welcomed_by.add(event.get("gateway_id"))
        if len(self._welcomed_by) >= self.spec.num_gateways and not self.joined.done():
            self.joined.set_result(None)

    def _why(self) -> str:
        return ":\n  " + "\n  ".join(self._tail) if self._tail else ""


class Supervisor:
    """Owns the children. `start` may be called until `stop`.

    `on_restart(reason, wait_s)` is called before a child is started again.
    """

    def __init__(
        self,
        log_dir: Path,
        on_event: OnEvent,
        on_restart: OnRestart = lambda why, wait_s: None,
        restart_s: Sequence[float] = _RESTART_S,
    ) -> None:
        self._log_dir = log_dir
        self._on_event = on_event
        self._on_restart = on_restart
        self._restart_s = restart_s
        self._num_restarts: dict[str, int] = {}  # since the child last settled; only children that have been ready
        self._children: dict[asyncio.Task[None], Child] = {}
        self._restarting: dict[asyncio.Task[None], str] = {}  # by the child's name
        self._changed = asyncio.Event()

    async def start(self, spec: ServiceSpec, is_expendable: bool = False) -> Child:
        """Starts a child; does not wait for it to be ready."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *spec.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=spec.descriptors,
            env={**os.environ, SUPERVISED_ENV: "1", "PYTHONUNBUFFERED": "1", **spec.environment},
        )
        child = Child(spec, process, self._log_dir / f"{spec.name}.log", self._on_event, is_expendable)
        self._children[asyncio.create_task(child.watch())] = child
        self._changed.set()
        return child

    async def until_one_ends(self) -> None:
        """Restarts children that end, where allowed. Raises ServiceFailed as soon as one ends for good."""
        while True:
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            waited = {*self._children, *self._restarting, changed}
            try:
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            for restarted in self._restarting.keys() & done:
                del self._restarting[restarted]
                restarted.result()
            for task in [task for task in self._children if task in done]:
                await self._after_end(task)

    async def _after_end(self, task: asyncio.Task[None]) -> None:
        child = self._children.pop(task)
        try:
            await task
        except ServiceFailed as failure:
            if child.is_expendable:
                return
            if not self._may_restart(child):
                raise
            wait_s = self._wait_s(child)
            self._on_restart(failure.message, wait_s)
            self._restarting[asyncio.create_task(self._start_later(child.spec, wait_s))] = child.spec.name

    def _may_restart(self, child: Child) -> bool:
        """Whether a child may be restarted. A child that was never ready would fail again."""
        name, lived_s = child.spec.name, self._lived_s(child)
        is_ready = child.ready.done() if child.spec.announces else lived_s >= _SILENT_READY_S
        if is_ready:
            self._num_restarts.setdefault(name, 0)
        return child.spec.restarts and name in self._num_restarts

    def _wait_s(self, child: Child) -> float:
        name = child.spec.name
        num_before = 0 if self._lived_s(child) >= _SETTLED_S else self._num_restarts[name]
        self._num_restarts[name] = num_before + 1
        return self._restart_s[min(num_before, len(self._restart_s) - 1)]

    def _lived_s(self, child: Child) -> float:
        return asyncio.get_running_loop().time() - child.started_s

    async def _start_later(self, spec: ServiceSpec, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self.start(spec)

    async def retire(self, name: str, drain_s: float = 0.0) -> None:
        """Ends one child for good, giving it up to `drain_s` to finish accepted work. Returns when it is dead."""
        for task in [task for task, restarting in self._restarting.items() if restarting == name]:
            del self._restarting[task]
            await cancelled(task)
        retired = {task: child for task, child in self._children.items() if child.spec.name == name}
        for child in retired.values():
            child.is_expendable = True
        steps = ((signal.SIGUSR1, drain_s), (signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, None))
        for number, within_s in steps[0 if drain_s else 1 :]:
            alive = [child for task, child in retired.items() if not task.done()]
            _signal_all(alive, number)
            if alive:
                await asyncio.wait(retired, timeout=within_s)

    async def stop(self) -> None:
        """Sends SIGTERM to all children, and SIGKILL to those left after the grace. Returns when none is alive."""
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        self._restarting.clear()
        _signal_all(self._children.values(), signal.SIGTERM)
        if self._children:
            _, pending = await asyncio.wait(self._children, timeout=STOP_GRACE_S)
            _signal_all((self._children[task] for task in pending), signal.SIGKILL)
            await asyncio.gather(*self._children, return_exceptions=True)
        self._children.clear()


def _signal_all(children: Any, number: signal.Signals) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


async def _lines(stream: asyncio.StreamReader) -> Any:
    """Yields lines of any length. A line longer than the stream's buffer arrives in pieces."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as err:
            if err.partial:
                yield err.partial
            return
        except asyncio.LimitOverrunError as err:
            line = await stream.readexactly(err.consumed)
        yield line


def children_ready(children: Sequence[Child]) -> asyncio.Future[list[dict[str, Any]]]:
    """Resolves to every child's `service.ready` event."""
    return asyncio.gather(*(child.ready for child in children))
