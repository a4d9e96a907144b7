"""One child process of `halfmoon up`: what is known of it before it starts, and while it runs.

Its log lines arrive by pipe and are copied to a file. The few events that others act on (`service.ready`,
`weights.progress`, `worker.drained`) are read from them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from halfmoon.errors import ServiceFailed
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.processes.template_process import FORK_AGAIN
from halfmoon.up.supervision.log_files import LogFile
from halfmoon.up.supervision.service_process import ProcessStart, ServiceProcess

_TAIL_LINES = 15
_SILENT_READY_S = 10.0  # after this long, a child that does not announce itself counts as ready

OnEvent = Callable[[str, dict[str, Any]], None]
OnKilled = Callable[["Child", str], None]


@dataclass(frozen=True, slots=True)
class Room:
    """What a service reserves on a host that a cluster engine chooses. Services of one `unit` get the same host.

    `node`: the engine's name of the one host that will do; "" for any. `gpu`: its name of a kind of GPU; "" for any.
    `num_stages`: equal parts of a worker that may be on different hosts.
    `rest`: what the further ranks of a worker reserve that has no room on one host, by host.
    """

    num_cpus: float = 1.0
    num_gpus: int = 0
    unit: str = ""
    node: str = ""
    gpu: str = ""
    num_stages: int = 1
    rest: tuple[Room, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One child: its unique name, also that of its log file, its arguments to Python and its additional environment.

    `restarts`: a child that has been ready is started again whenever it ends on its own.
    `announces`: it logs `service.ready`. A child that does not counts as ready after ten seconds.
    `drain_s`: how long it may serve on after SIGTERM. Such children are stopped before the others.
    `num_gateways`: the number of gateways that must welcome it before it has joined.
    `cluster_role`: the role whose credential it gets.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    restarts: bool = False
    announces: bool = True
    drain_s: float = 0.0
    num_gateways: int = 1
    metrics_port: int | None = None  # where Prometheus finds it
    cluster_role: ClusterRole | None = None
    descriptors: tuple[int, ...] = ()  # of this process, which the child inherits under the same numbers
    python: str = sys.executable  # the interpreter
    room: Room | None = None  # on another host; None: it starts on this one

    @property
    def process_start(self) -> ProcessStart:
        """Returns what its process is started with."""
        return ProcessStart(self.python, self.arguments, self.environment, self.descriptors)


class Child:
    """Owns one child process, its log file and its announcements.

    Its process may be a template, whose child serves and may be replaced, or serve on when the template has died.
    An expendable child, on trial, being retired, or drained for good, may end without failure or restart.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        process: ServiceProcess,
        log_file: LogFile,
        on_event: OnEvent,
        on_killed: OnKilled,
        is_expendable: bool = False,
    ) -> None:
        """`on_killed(child, reason)`: the process that serves was ended from outside, and its template waits."""
        self.spec = spec
        self.process = process
        self.is_expendable = is_expendable
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[ServiceFailed] = asyncio.get_running_loop().create_future()
        self.exit_status = 0  # of the process that has ended
        self._started_s = asyncio.get_running_loop().time()
        self._ready_s: float | None = None
        self._log_file = log_file
        self._on_event = on_event
        self._on_killed = on_killed
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._welcomed_by: set[Any] = set()
        self.role: str | None = None  # that a worker serves now, if it was changed since it started

    async def watch(self) -> None:
        """Copies the child's lines to its log until it ends, then raises ServiceFailed."""
        with closing(self._log_file):
            async for line in self.process.lines():
                self._log_file.write(line)
                self._read(line.decode(errors="replace").rstrip())
        code = self.exit_status = await self.process.wait()
        failure = ServiceFailed(
            f"{self.spec.name} ended with exit status {code}{self._why()}\nIts log: {self._log_file.path}"
        )
        self.ended.set_result(failure)
        raise failure

    def served_s(self) -> float | None:
        """Seconds since it was ready; None if it never was, or if no gateway had it before one refused it."""
        now_s = asyncio.get_running_loop().time()
        if self.spec.announces:
            return None if self._ready_s is None else now_s - self._ready_s
        lived_s = now_s - self._started_s
        return lived_s - _SILENT_READY_S if lived_s >= _SILENT_READY_S else None

    def fork_again(self) -> None:
        """Lets the template fork the next process. It has not served yet."""
        self._started_s, self._ready_s = asyncio.get_running_loop().time(), None
        self.process.write(FORK_AGAIN)

    def _read(self, line: str) -> None:
        event: Any = None
        with suppress(ValueError):
            event = json.loads(line)
        if not isinstance(event, dict):
            self._tail.append(line)
            return
        if event.get("event") == "service.ready":
            self._ready_s, self.role = asyncio.get_running_loop().time(), None
            if not self.ready.done():
                self.ready.set_result(event)
        if event.get("event") == "worker.drained" and not event.get("returns"):
            self.is_expendable = True
        if event.get("event") == "worker.role_changed":
            self.role = event.get("role")
        if event.get("event") == "service.killed":
            self._on_killed(self, str(event.get("reason", "without a reason")))
        if event.get("event") == "registration.welcome":
            self._welcome(event)
        if event.get("event") == "registration.refused" and not self._welcomed_by:
            self._ready_s = None  # it has served nobody, and would be refused again
        if event.get("level") in ("ERROR", "CRITICAL"):
            words = str(event.get("reason") or event.get("exc_info") or event.get("event"))
            if words not in self._tail:  # one layer says what another has said
                self._tail.append(words)
        self._on_event(self.spec.name, event)

    def _welcome(self, event: dict[str, Any]) -> None:
        self._welcomed_by.add(event.get("gateway_id"))
        if len(self._welcomed_by) >= self.spec.num_gateways and not self.joined.done():
            self.joined.set_result(None)

    def _why(self) -> str:
        return ":\n  " + "\n  ".join(self._tail) if self._tail else ""


def children_ready(children: Sequence[Child]) -> asyncio.Future[list[dict[str, Any]]]:
    """Resolves to every child's `service.ready` event."""
    return asyncio.gather(*(child.ready for child in children))
