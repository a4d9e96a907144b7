"""The workers of `halfmoon up` while it runs: new ones join before old ones go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, Incompatible, NoCapacity, ServiceFailed
from halfmoon.policy.view.worker_view import Role
from halfmoon.up.fleet_diff import WorkerChange, worker_change
from halfmoon.up.service_specs import UpOptions, WorkerSpec, WorkerStart, wanted_workers
from halfmoon.up.supervisor import Child, Supervisor

JOIN_S = 900.0  # for a worker to load its weights and join
DRAIN_S = 600.0  # for a worker to finish its requests; what is left then moves to others
_RETRY_AFTER_MS = 10_000

# What a planned worker of a role with that index is started as, which sees these GPUs.
MakeSpec: TypeAlias = Callable[[UpOptions, Role, int, WorkerStart, Mapping[str, str]], WorkerSpec]
OnProgress: TypeAlias = Callable[[str, int, int], None]  # what; done, of how many


class WorkerFleet:
    """Owns which workers run, and their one change at a time. `of_host` are the GPUs that they may use."""

    def __init__(
        self, supervisor: Supervisor, workers: Sequence[WorkerSpec], make: MakeSpec, of_host: Sequence[str]
    ) -> None:
        self._supervisor = supervisor
        self._workers = list(workers)
        self._make = make
        self._of_host = of_host
        self._num_made = len(workers)  # an index is given once: log files, and who is told apart by its name
        self._change: asyncio.Task[WorkerChange] | None = None

    @property
    def workers(self) -> Sequence[WorkerSpec]:
        """Those that run."""
        return self._workers

    def preview(self, planned: UpOptions) -> tuple[WorkerChange, str]:
        """What would change, and why not without stopping first, if so. Raises Incompatible for too few GPUs."""
        change = worker_change(self._workers, wanted_workers(planned))
        change.gpus(self._of_host, stop_first=True)
        try:
            change.gpus(self._of_host, stop_first=False)
        except Incompatible as error:
            return change, error.message
        return change, ""

    def begin(self, planned: UpOptions, stop_first: bool, on_progress: OnProgress) -> asyncio.Task[WorkerChange]:
        """Changes the workers. The task raises ServiceFailed when a new one does not join: the old ones serve on.

        Raises NoCapacity while another change is under way, and Incompatible where too few GPUs are free.
        """
        if self._change is not None and not self._change.done():
            raise NoCapacity("another change of the workers is under way", retry_after_ms=_RETRY_AFTER_MS)
        change = worker_change(self._workers, wanted_workers(planned))
        visible = change.gpus(self._of_host, stop_first)
        new = [
            self._make(planned, role, self._num_made + at, start, gpus)
            for at, ((role, start), gpus) in enumerate(zip(change.started, visible, strict=True))
        ]
        self._num_made += len(new)
        run = self._stop_then_start if stop_first else self._start_then_stop
        self._change = asyncio.create_task(run(change, new, on_progress))
        return self._change

    async def close(self) -> None:
        """Ends a change in the middle; who started the supervisor stops the workers."""
        if self._change is not None:
            await cancelled(self._change)

    async def _start_then_stop(
        self, change: WorkerChange, new: Sequence[WorkerSpec], on_progress: OnProgress
    ) -> WorkerChange:
        await self._join(new, on_progress)
        await self._retire(change.stopped, on_progress)
        return change

    async def _stop_then_start(
        self, change: WorkerChange, new: Sequence[WorkerSpec], on_progress: OnProgress
    ) -> WorkerChange:
        await self._retire(change.stopped, on_progress)
        try:
            await self._join(new, on_progress)
        except HalfmoonError:
            await self._join(change.stopped, on_progress)
            raise
        return change

    async def _join(self, specs: Sequence[WorkerSpec], on_progress: OnProgress) -> None:
        """All of them, or none."""
        on_progress("starting", 0, len(specs))
        children = [await self._supervisor.start(spec, is_expendable=True) for spec in specs]
        joining = [asyncio.create_task(_joined(child)) for child in children]
        try:
            for done, joined in enumerate(asyncio.as_completed(joining), 1):
                await joined
                on_progress("starting", done, len(specs))
        except HalfmoonError:
            await asyncio.gather(*(self._supervisor.retire(spec.name) for spec in specs))
            raise
        finally:
            await asyncio.gather(*map(cancelled, joining))
        for child in children:
            child.is_expendable = False
        self._workers += specs

    async def _retire(self, specs: Sequence[WorkerSpec], on_progress: OnProgress) -> None:
        on_progress("draining", 0, len(specs))
        self._workers = [spec for spec in self._workers if spec not in specs]
        going = [self._supervisor.retire(spec.name, DRAIN_S) for spec in specs]
        for done, gone in enumerate(asyncio.as_completed(going), 1):
            await gone
            on_progress("draining", done, len(specs))


async def _joined(child: Child) -> None:
    """Raises ServiceFailed for one that ends before, or takes too long."""
    either: set[asyncio.Future[Any]] = {child.joined, child.ended}
    await asyncio.wait(either, timeout=JOIN_S, return_when=asyncio.FIRST_COMPLETED)
    if child.ended.done():
        raise child.ended.result()
    if not child.joined.done():
        raise ServiceFailed(f"{child.spec.name} did not join its gateway within {JOIN_S:.0f} s")
