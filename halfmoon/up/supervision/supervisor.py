"""Starts services as child processes, watches them, and stops them all.

Children run in sessions of their own, so that Ctrl-C reaches only this process. Each child's stdin is a pipe from this
process: if this process is killed, the children see the pipe close, and stop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from functools import partial

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, ServiceFailed
from halfmoon.rpc.processes.template_process import was_ended_from_outside
from halfmoon.up.supervision.child import Child, OnEvent, ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.restarts import DELAYS_S, RestartPolicy
from halfmoon.up.supervision.service_process import ServiceProcess, local_process

STOP_GRACE_S = 3.5  # from SIGTERM, or the end of the drain, to SIGKILL
_NO_PROCESS_S = 1.0  # until the next try to start a process that could not be started

OnRestart = Callable[[str, float], None]
Launch = Callable[[ServiceSpec], Awaitable[ServiceProcess]]


async def launch_here(spec: ServiceSpec) -> ServiceProcess:
    """Starts a service on this host. Raises OSError."""
    return await local_process(spec.process_start)


class Supervisor:
    """Owns the children. `start` may be called until `stop`.

    `on_restart(reason, wait_s)` is called before a child is started again.
    """

    def __init__(
        self,
        logs: LogFiles,
        on_event: OnEvent,
        on_restart: OnRestart = lambda why, wait_s: None,
        restart_s: Sequence[float] = DELAYS_S,
        launch: Launch = launch_here,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a child has started or ended."""
        self._logs = logs
        self._on_event = on_event
        self._on_restart = on_restart
        self._restarts = RestartPolicy(restart_s)
        self._launch = launch
        self._on_change = on_change
        self._children: dict[asyncio.Task[None], Child] = {}
        self._restarting: dict[asyncio.Task[None], str] = {}  # by the child's name
        self._changed = asyncio.Event()

    async def start(self, spec: ServiceSpec, is_expendable: bool = False) -> Child:
        """Starts a child; does not wait for it to be ready. Raises ServiceFailed if there is no process."""
        try:
            return await self._start(spec, is_expendable)
        except OSError as error:
            raise ServiceFailed(f"{spec.name} could not be started: {error}") from error

    async def _start(self, spec: ServiceSpec, is_expendable: bool = False) -> Child:
        process = await self._launch(spec)
        child = Child(spec, process, self._logs.file(spec.name), self._on_event, self._on_killed, is_expendable)
        self._children[asyncio.create_task(child.watch())] = child
        self._changed.set()
        self._on_change()
        return child

    @property
    def children(self) -> Sequence[Child]:
        """Returns the children that run."""
        return tuple(self._children.values())

    @property
    def names(self) -> Set[str]:
        """Returns the names of the children that run or are being started again."""
        return {child.spec.name for child in self._children.values()} | set(self._restarting.values())

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
        self._on_change()
        try:
            await task
        except ServiceFailed as failure:
            if child.is_expendable:
                return
            wait_s = self._wait_s(child, from_outside=was_ended_from_outside(child.exit_status))
            if wait_s is None:
                raise
            self._restart(child.spec.name, failure.message, wait_s, partial(self._start_again, child.spec))

    def _on_killed(self, child: Child, reason: str) -> None:
        """Lets the child's template, which waits, fork another one, or ends the template."""
        wait_s = None if child.is_expendable else self._wait_s(child, from_outside=True)
        if wait_s is None:
            child.process.kill()
        else:
            self._restart(child.spec.name, f"{child.spec.name} {reason}", wait_s, partial(_fork_again, child))

    def _wait_s(self, child: Child, *, from_outside: bool) -> float | None:
        if not child.spec.restarts:
            return None
        return self._restarts.delay_s(child.spec.name, child.served_s(), from_outside=from_outside)

    def _restart(self, name: str, reason: str, wait_s: float, start: Callable[[], Awaitable[None]]) -> None:
        async def later() -> None:
            await asyncio.sleep(wait_s)
            await start()

        self._on_restart(reason, wait_s)
        self._restarting[asyncio.create_task(later())] = name
        self._changed.set()

    async def _start_again(self, spec: ServiceSpec) -> None:
        while True:
            try:
                await self._start(spec)
                return
            except (OSError, HalfmoonError) as error:  # out of memory or processes for now, or the host is another one
                wait_s = self._restarts.delay_s(spec.name, None, from_outside=False) or _NO_PROCESS_S
                self._on_restart(f"{spec.name} could not be started: {error}", wait_s)
                await asyncio.sleep(wait_s)

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
        """Sends SIGTERM, first to the children that drain and then to the others. Returns when none is alive.

        A child is killed if it lives on after its drain and a grace.
        """
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        self._restarting.clear()
        await self._end([task for task, child in self._children.items() if child.spec.drain_s])
        await self._end(list(self._children))
        self._children.clear()

    def kill(self) -> None:
        """Kills all children at once. `stop` still has to be awaited."""
        _signal_all((child for task, child in self._children.items() if not task.done()), signal.SIGKILL)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        alive = {task: self._children[task] for task in tasks if not task.done()}
        _signal_all(alive.values(), signal.SIGTERM)
        if alive:
            longest_s = max(child.spec.drain_s if child.ready.done() else 0.0 for child in alive.values())
            _, pending = await asyncio.wait(alive, timeout=longest_s + STOP_GRACE_S)
            _signal_all((alive[task] for task in pending), signal.SIGKILL)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fork_again(child: Child) -> None:
    child.fork_again()


def _signal_all(children: Iterable[Child], number: signal.Signals) -> None:
    for child in children:
        child.process.signal(number)
