"""Changes the workers of a running `halfmoon up`: new ones join before old ones drain and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, Incompatible, NoCapacity, ServiceFailed
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.up.fleet.fleet_diff import WorkerChange, worker_change
from halfmoon.up.specs.worker_specs import WorkerSpec
from halfmoon.up.supervision.child import Child
from halfmoon.up.supervision.supervisor import Supervisor
from halfmoon.up.this_host.gpus import HostGPUs
from halfmoon.up.up_options import UpOptions, WorkerStart, wanted_workers

JOIN_S = 900.0  # time for a worker to load its weights and join
DRAIN_S = 600.0  # time for a worker to finish its requests; the rest then moves to other workers
_RETRY_AFTER_MS = 10_000

# Builds the spec of a planned worker from options, role, index, start and the environment that names its GPUs.
MakeSpec: TypeAlias = Callable[[UpOptions, Role, int, WorkerStart, Mapping[str, str]], WorkerSpec]
OnProgress: TypeAlias = Callable[[str, int, int], None]  # (stage, done, total)


class WorkerFleet:
    """Owns the list of running workers and their one change at a time. `host_gpus` are the GPUs they may use.

    `share` is called with all workers that start together, before the first does.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        workers: Sequence[WorkerSpec],
        make: MakeSpec,
        host_gpus: HostGPUs,
        share: Callable[[Sequence[WorkerSpec]], None] = lambda specs: None,
    ) -> None:
        self._share = share
        self._supervisor = supervisor
        self._workers = list(workers)
        self._make = make
        self._host_gpus = host_gpus
        self._num_made = len(workers)  # an index is used once, so that names and log files stay unique
        self._change: asyncio.Task[WorkerChange] | None = None

    @property
    def workers(self) -> Sequence[WorkerSpec]:
        """Returns the specs of the running workers, with the roles that operators have given them.

        Those that an operator has drained are gone.
        """
        present, roles = self._supervisor.names, {child.spec.name: child.role for child in self._supervisor.children}
        self._workers = [spec for spec in self._workers if spec.name in present]
        return [_in_role(spec, roles.get(spec.name)) for spec in self._workers]

    def preview(self, planned: UpOptions) -> tuple[WorkerChange, str]:
        """Returns the change, and why it needs `stop_first`, or "". Raises Incompatible if there are too few GPUs."""
        change = worker_change(self.workers, wanted_workers(planned))
        change.gpus(self._host_gpus, stop_first=True)
        try:
            change.gpus(self._host_gpus, stop_first=False)
        except Incompatible as error:
            return change, error.message
        return change, ""

    def begin(self, planned: UpOptions, stop_first: bool, on_progress: OnProgress) -> asyncio.Task[WorkerChange]:
        """Starts a change. Its task raises ServiceFailed if a new worker does not join; the old ones then keep serving.

        Raises NoCapacity while another change is in progress, and Incompatible if too few GPUs are free.
        """
        change = worker_change(self.workers, wanted_workers(planned))
        return self._begin(change, planned, stop_first, on_progress)

    def begin_adding(self, options: UpOptions, role: Role, on_progress: OnProgress) -> asyncio.Task[WorkerChange]:
        """Starts one worker more, with the options of one that runs, best of that role. Raises as `begin` does."""
        workers = self.workers
        alike = sorted(workers, key=lambda spec: spec.role != role)
        if not alike:
            raise Incompatible("no worker runs that another one could be like")
        change = WorkerChange(tuple(workers), (), ((role, alike[0].start),))
        return self._begin(change, options, False, on_progress)

    def _begin(
        self, change: WorkerChange, planned: UpOptions, stop_first: bool, on_progress: OnProgress
    ) -> asyncio.Task[WorkerChange]:
        if self._change is not None and not self._change.done():
            raise NoCapacity("another change of the workers is in progress", retry_after_ms=_RETRY_AFTER_MS)
        visible = change.gpus(self._host_gpus, stop_first)
        new = [
            self._make(planned, role, self._num_made + offset, start, gpus)
            for offset, ((role, start), gpus) in enumerate(zip(change.started, visible, strict=True))
        ]
        self._num_made += len(new)
        self._share(new)
        run = self._stop_then_start if stop_first else self._start_then_stop
        self._change = asyncio.create_task(run(change, new, on_progress))
        return self._change

    async def close(self) -> None:
        """Aborts a change. The owner of the supervisor stops the workers."""
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
        leaving = {spec.name for spec in change.stopped}
        stopped = [spec for spec in self._workers if spec.name in leaving]  # as they were started
        await self._retire(change.stopped, on_progress)
        try:
            await self._join(new, on_progress)
        except HalfmoonError:
            await self._join(stopped, on_progress)
            raise
        return change

    async def _join(self, specs: Sequence[WorkerSpec], on_progress: OnProgress) -> None:
        """Starts workers and waits until all have joined; if one fails, stops all of them and raises its error."""
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
        leaving = {spec.name for spec in specs}
        self._workers = [spec for spec in self._workers if spec.name not in leaving]
        going = [self._supervisor.retire(spec.name, DRAIN_S) for spec in specs]
        for done, gone in enumerate(asyncio.as_completed(going), 1):
            await gone
            on_progress("draining", done, len(specs))


def _in_role(spec: WorkerSpec, role: str | None) -> WorkerSpec:
    return replace(spec, role=role) if role in ROLES else spec


async def _joined(child: Child) -> None:
    """Waits until a worker has joined. Raises ServiceFailed if it ends first or takes longer than `JOIN_S`."""
    either: set[asyncio.Future[Any]] = {child.joined, child.ended}
    await asyncio.wait(either, timeout=JOIN_S, return_when=asyncio.FIRST_COMPLETED)
    if child.ended.done():
        raise child.ended.result()
    if not child.joined.done():
        raise ServiceFailed(f"{child.spec.name} did not join its gateway within {JOIN_S:.0f} s")
