"""Serves halfmoon.Fleet, through which the planner of `halfmoon up` changes workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial

import grpc
from prometheus_client import CollectorRegistry

from halfmoon.errors import InvalidRequest
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.rpc.credentials.access import OPEN_ACCESS, CallAccess
from halfmoon.rpc.processes.owned_directory import owned_directory
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.up.fleet.fleet import OnProgress, WorkerFleet
from halfmoon.up.fleet.fleet_diff import WantedWorker, WorkerChange
from halfmoon.up.up_options import UpOptions


@contextmanager
def fleet_address() -> Iterator[str]:
    """Yields the address of a Unix socket in a directory that only this user can enter, short enough for the system."""
    with owned_directory("up") as directory:
        yield f"unix:{directory / 'fleet'}"


@asynccontextmanager
async def fleet_server(
    address: str,
    fleet: WorkerFleet,
    options: UpOptions,
    planned: Callable[[str], UpOptions],
    on_end: Callable[[asyncio.Task[WorkerChange]], None],
    access: CallAccess = OPEN_ACCESS,
) -> AsyncIterator[None]:
    """Serves at `address` until the block ends. `planned` reads a plan's text and may block.

    `on_end` is called with each change that has ended.
    """
    servicer = FleetServicer(fleet, options, planned, on_end)
    try:
        metrics = RpcMetrics(CollectorRegistry())
        async with running_server(address, [servicer.register], metrics, grace_s=0.0, access=access):
            yield
    finally:
        await fleet.close()


class FleetServicer(planner_pb2_grpc.FleetServicer):
    """Knows the fleet. Owns nothing: a change belongs to the fleet and continues after its caller has left."""

    def __init__(
        self,
        fleet: WorkerFleet,
        options: UpOptions,
        planned: Callable[[str], UpOptions],
        on_end: Callable[[asyncio.Task[WorkerChange]], None],
    ) -> None:
        """options: those that the system runs with, for workers that are added."""
        self._fleet = fleet
        self._options = options
        self._planned = planned
        self._on_end = on_end

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        planner_pb2_grpc.add_FleetServicer_to_server(self, server)

    async def Preview(
        self, request: planner_pb2.FleetRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.WorkerChange:
        """See planner.proto."""
        change, why_not = self._fleet.preview(await asyncio.to_thread(self._planned, request.plan_yaml))
        return change_message(change, why_not)

    async def Change(
        self, request: planner_pb2.FleetRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.ApplyUpdate]:
        """See planner.proto."""
        planned = await asyncio.to_thread(self._planned, request.plan_yaml)
        begin = partial(self._fleet.begin, planned, request.stop_first)
        async with aclosing(self._updates(begin)) as updates:
            async for update in updates:
                yield update

    async def Add(
        self, request: planner_pb2.AddWorkerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.ApplyUpdate]:
        """See planner.proto."""
        role = next((role for role in ROLES if role == request.role), None)
        if role is None:
            raise InvalidRequest(f"role must be one of {', '.join(ROLES)}", param="role")
        async with aclosing(self._updates(partial(self._fleet.begin_adding, self._options, role))) as updates:
            async for update in updates:
                yield update

    async def _updates(
        self, begin: Callable[[OnProgress], asyncio.Task[WorkerChange]]
    ) -> AsyncGenerator[planner_pb2.ApplyUpdate, None]:
        """Begins a change and yields its updates to its end; it goes on after its reader has left."""
        updates: asyncio.Queue[planner_pb2.Progress | None] = asyncio.Queue()

        def note(what: str, done: int, total: int) -> None:
            updates.put_nowait(planner_pb2.Progress(what=what, done=done, total=total))

        change = begin(note)
        change.add_done_callback(lambda _: updates.put_nowait(None))
        change.add_done_callback(self._on_end)
        while (progress := await updates.get()) is not None:
            yield planner_pb2.ApplyUpdate(progress=progress)
        yield planner_pb2.ApplyUpdate(applied=change_message(await asyncio.shield(change)))


def change_message(change: WorkerChange, why_not: str = "") -> planner_pb2.WorkerChange:
    """Converts a change to a message."""
    return planner_pb2.WorkerChange(
        now=_groups(change.now),
        then=_groups(change.then),
        num_kept=len(change.kept),
        num_started=len(change.started),
        num_stopped=len(change.stopped),
        needs_stop_first=why_not,
    )


def _groups(workers: Sequence[WantedWorker]) -> list[planner_pb2.WorkerGroup]:
    return [
        planner_pb2.WorkerGroup(role=role, count=count, options=" ".join(start.arguments))
        for (role, start), count in sorted(Counter(workers).items())
    ]
