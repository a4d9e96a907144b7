"""Asks `halfmoon up` to change the workers that run on this host."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from halfmoon.errors import Incompatible
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer

_PREVIEW_S = 30.0  # includes reading the model's config
_CHANGE_S = 3600.0  # includes loading weights and draining requests


class Fleet:
    """Knows where `halfmoon up` serves halfmoon.Fleet, if anywhere. Owns nothing.

    Without an address, calls raise Incompatible.
    """

    def __init__(self, address: str | None, credential: Credential | None = None) -> None:
        self._address = address
        self._credential = credential

    @property
    def can_change(self) -> bool:
        """Whether `halfmoon up` lets this planner change workers."""
        return self._address is not None

    async def preview(self, plan_yaml: str) -> planner_pb2.WorkerChange:
        """Returns what the plan would change."""
        async with self._peer() as peer:
            request = planner_pb2.FleetRequest(plan_yaml=plan_yaml)
            stub = planner_pb2_grpc.FleetStub(peer.channel)
            change: planner_pb2.WorkerChange = await peer.call(stub.Preview, request, deadline_s=_PREVIEW_S)
            return change

    async def change(self, plan_yaml: str, stop_first: bool) -> AsyncGenerator[planner_pb2.ApplyUpdate, None]:
        """Yields the updates of the change, to its end."""
        async with self._peer() as peer:
            request = planner_pb2.FleetRequest(plan_yaml=plan_yaml, stop_first=stop_first)
            stub = planner_pb2_grpc.FleetStub(peer.channel)
            async with peer.stream(stub.Change, request, deadline_s=_CHANGE_S) as updates:
                async for update in updates:
                    yield update

    async def add(self, role: Role) -> None:
        """Starts one worker more and returns when it has joined."""
        async with self._peer() as peer:
            request = planner_pb2.AddWorkerRequest(role=role)
            stub = planner_pb2_grpc.FleetStub(peer.channel)
            async with peer.stream(stub.Add, request, deadline_s=_CHANGE_S) as updates:
                async for _ in updates:
                    pass

    @asynccontextmanager
    async def _peer(self) -> AsyncIterator[Peer]:
        if self._address is None:
            raise Incompatible(
                "plans cannot be applied here: only a planner that `halfmoon up` started changes workers, and those "
                "are not simulated. Download plan.yaml and start `halfmoon up --plan plan.yaml --model MODEL`, or "
                "write its numbers of workers into docker-compose.yml"
            )
        async with Peer(self._address, self._credential, "operator") as peer:  # `halfmoon up` is that to its services
            yield peer
