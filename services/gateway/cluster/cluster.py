"""The gateway's side of the cluster: registrations, connections to the members, and their token streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import grpc

from halfmoon.background import Changes, logged, running
from halfmoon.errors import HalfmoonError, InvalidRequest, Unavailable
from halfmoon.pb.decode_pb2 import TokensRequest
from halfmoon.pb.gateway_pb2 import (
    Drain,
    GatewayMessage,
    RoleChange,
    Welcome,
    WorkerIdentity,
    WorkerLoad,
    WorkerMessage,
)
from halfmoon.pb.gateway_pb2_grpc import ClusterServicer
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import LONG_LIVED_S
from services.gateway.cluster.member import PB_ROLES
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.request_ends import DEADLINE_S, RETRY_S, RequestEnds
from services.gateway.cluster.token_router import GatewayStopping, TokenRouter
from services.gateway.cluster.worker import Worker
from services.gateway.cluster.worker_news import take_news

log = logging.getLogger(__name__)

_GATHER_S = 0.05  # changes of members in this time are told together
_REFRESH_S = 0.05  # after a change the view is brought up to date, if nobody has read it


class Cluster(ClusterServicer):
    """Owns the connected workers and the tasks that serve them. `Membership` knows who is a member."""

    def __init__(
        self,
        gateway_id: str,
        membership: Membership,
        tasks: asyncio.TaskGroup,
        credential: Credential | None = None,
    ) -> None:
        self.gateway_id = gateway_id
        self._credential = credential
        self.membership = membership
        self.router = TokenRouter()
        self.clock = time.monotonic
        self._tasks = tasks
        self._workers: dict[str, Worker] = {}
        self._readers: dict[Worker, asyncio.Task[None]] = {}
        self.ends = RequestEnds(gateway_id, self.spawn)
        self._changes = Changes()
        self.started_s = self.changed_s = self.clock()
        self._closing = asyncio.Event()
        self._refresh: asyncio.TimerHandle | None = None
        membership.on_stale = self._refresh_soon

    def worker(self, worker_id: str) -> Worker:
        """The connected worker of this id. Raises Unavailable if it has just left."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise Unavailable(f"worker {worker_id} has left the cluster")
        return worker

    def workers(self) -> list[Worker]:
        """The connected workers."""
        return list(self._workers.values())

    def drain(self, worker_id: str, *, returns: bool) -> None:
        """Has the worker finish its work and end; `returns`: its supervisor starts it again. Raises Unavailable."""
        self._order(worker_id, GatewayMessage(drain=Drain(returns=returns)))

    def change_role(self, worker_id: str, role: Role, epoch: int) -> None:
        """Has the worker serve another role, unless its epoch is another one than this. Raises Unavailable."""
        self._order(worker_id, GatewayMessage(change_role=RoleChange(role=PB_ROLES[role], epoch=epoch)))

    def _order(self, worker_id: str, message: GatewayMessage) -> None:
        worker = self.worker(worker_id)
        worker.orders.append(message)
        worker.has_news.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task of its own and logs its error. Raises GatewayStopping at the very end."""
        guarded = logged(work)
        try:
            return self._tasks.create_task(guarded)
        except RuntimeError as error:  # the group takes no more tasks
            guarded.close()
            work.close()
            raise GatewayStopping("the gateway is stopping") from error

    def until_changed(self) -> Coroutine[Any, Any, Any]:
        """An awaitable that is done once a worker has joined, left, or become reachable after this call."""
        return self._changes.next()

    async def Register(
        self, messages: AsyncIterator[WorkerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[GatewayMessage]:
        """One worker's membership, which lasts as long as this stream and its heartbeats.

        A drained worker closes its half of the stream. The other half ends once its last tokens are read.
        """
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "identity":
            raise InvalidRequest("the first message of a registration must be the identity", param="identity")
        worker = self._join(first.identity, first.process_key)
        reason: HalfmoonError = Unavailable("the worker ended its registration")
        try:
            yield GatewayMessage(
                welcome=Welcome(gateway_id=self.gateway_id, heartbeat_interval_s=self.membership.heartbeat_interval_s)
            )
            async with aclosing(self._follow(worker, messages)) as responses:
                async for response in responses:
                    yield response
        except HalfmoonError as error:
            reason = error
            raise
        finally:
            self.remove(worker, reason)

    def remove(self, worker: Worker, reason: HalfmoonError) -> None:
        """Ends a membership and notifies the requests on the worker. Idempotent."""
        if not self.membership.leave(worker.member, self.clock()) and worker.gone.done():
            return
        log.info("worker.left", extra={"worker_id": worker.member.worker_id, "reason": reason.message})
        self._forget(worker, reason)

    def expire(self, now_s: float) -> None:
        """Removes the workers that missed three heartbeats."""
        for member in self.membership.overdue(now_s):
            self.remove(self._workers[member.worker_id], Unavailable(f"worker {member.worker_id} missed heartbeats"))

    async def watch_heartbeats(self) -> None:
        """Calls `expire` as long as the gateway runs.

        While this process is stalled, the workers' reports wait in its sockets: they must not count as missed.
        """
        interval_s = self.membership.heartbeat_interval_s
        while True:
            due_s = self.clock() + interval_s / 2
            await asyncio.sleep(interval_s / 2)
            now_s = self.clock()
            stalled_s = max(now_s - due_s, 0.0)
            if stalled_s > interval_s:
                log.warning("gateway.stalled", extra={"stalled_s": stalled_s})
            self.membership.excuse(stalled_s, now_s)
            self.expire(now_s)

    async def close(self, grace_s: float) -> None:
        """Ends every membership. Pending cancellations have `grace_s` to reach their workers."""
        await self.ends.close(grace_s)
        for worker in list(self._workers.values()):
            self.remove(worker, Unavailable("the gateway is stopping"))
        self._closing.set()

    async def announce_members(self) -> None:
        """Tells workers of the stores and of the decode workers, as long as the gateway runs."""
        while True:
            changed = self.until_changed()
            for worker in self._workers.values():
                worker.has_news.set()
            await changed
            await asyncio.sleep(_GATHER_S)  # workers often join together

    def _join(self, identity: WorkerIdentity, process_key: bytes) -> Worker:
        if self._closing.is_set():
            raise Unavailable("the gateway is stopping")
        before = self._workers.get(identity.worker_id)
        member = self.membership.join(identity, self.clock(), process_key)
        if before is not None:
            self._forget(before, Unavailable(f"worker {identity.worker_id} registered again"))
        worker = self._workers[identity.worker_id] = Worker(member, self._credential)
        fields = {"worker_id": member.worker_id, "role": member.role, "address": identity.address}
        log.info("worker.joined", extra=fields)
        dtypes = [layout.dtype for layout in self.membership.kv_layouts]
        if identity.layout.dtype != dtypes[0]:
            reason = "workers of different dtypes hand KV over to each other, and share no cached blocks"
            log.warning("worker.other_dtype", extra={**fields, "dtypes": dtypes, "reason": reason})
        worker.has_news.set()
        self._notify()
        self._read(worker)
        return worker

    def _read(self, worker: Worker) -> None:
        """Begins to read its tokens if it decodes. A worker that no longer does may have answers to finish."""
        if worker.member.role != "prefill" and worker not in self._readers:
            self._readers[worker] = self.spawn(self._read_tokens(worker))

    def _note_role(self, worker: Worker) -> None:
        """Shows everybody a worker's new role."""
        member = worker.member
        log.info("worker.role", extra={"worker_id": member.worker_id, "role": member.role, "epoch": member.role_epoch})
        self._read(worker)
        self._notify()

    def _forget(self, worker: Worker, reason: HalfmoonError) -> None:
        if self._workers.get(worker.member.worker_id) is worker:
            del self._workers[worker.member.worker_id]
        if not worker.gone.done():
            worker.gone.set_result(reason)
        reader = self._readers.pop(worker, None)
        if reader is not None:
            reader.cancel()
        self.router.lose(worker.member.worker_id, reason)
        with suppress(GatewayStopping):  # garbage collection closes the channel
            self.spawn(self._close_later(worker))
        self._notify()

    def _refresh_soon(self) -> None:
        """Has the view brought up to date between requests, so that the next one finds it so."""
        if self._refresh is None:
            self._refresh = asyncio.get_running_loop().call_later(_REFRESH_S, self._refresh_view)

    def _refresh_view(self) -> None:
        self._refresh = None
        self.membership.refresh()

    def _notify(self) -> None:
        self.changed_s = self.clock()
        self._changes.notify()

    async def _follow(
        self, worker: Worker, messages: AsyncIterator[WorkerMessage]
    ) -> AsyncGenerator[GatewayMessage, None]:
        """Takes reports until the stream ends, and yields news. Raises Unavailable if the membership ends first."""
        async with running(self._read_reports(worker, messages)) as reading:
            while True:
                async with running(worker.has_news.wait()) as news:
                    first: set[asyncio.Future[Any]] = {reading, worker.gone, news}
                    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if worker.gone.done():
                    raise worker.gone.result()
                if reading.done():
                    await reading
                    await self._last_tokens(worker)
                    return
                for message in take_news(worker, self.membership):
                    yield message

    async def _last_tokens(self, worker: Worker) -> None:
        """Returns when all tokens of a drained worker are read, or its membership has ended: it sends no heartbeats."""
        reader = self._readers.get(worker)
        if reader is not None and worker.member.load.draining:
            either: set[asyncio.Future[Any]] = {reader, worker.gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def _read_reports(self, worker: Worker, messages: AsyncIterator[WorkerMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "load":
                    self._take_report(worker, message.load)
                case "blocks":
                    if not self.membership.note_blocks(worker.member, message.blocks):
                        worker.missed_blocks = True
                        worker.has_news.set()
                case "identity":
                    raise InvalidRequest("after its identity a worker sends load reports and blocks", param="load")

    def _take_report(self, worker: Worker, load: WorkerLoad) -> None:
        was_leaving = worker.member.is_leaving
        if self.membership.report(worker.member, load, self.clock()):
            self._note_role(worker)
        if worker.member.is_leaving and not was_leaving:
            self.router.leave(worker.member.worker_id)

    async def _read_tokens(self, worker: Worker) -> None:
        """Reads one worker's token stream, and reconnects after a break: requests that ran there count as lost.

        Returns at the end of a drained worker's stream.
        """
        num_failures = 0
        while True:
            reason: HalfmoonError = Unavailable(f"worker {worker.member.worker_id} ended its token stream")
            try:
                await self._read_token_stream(worker)
                if worker.member.load.draining:
                    return
            except HalfmoonError as error:
                reason = error
            except Exception as error:  # our own bug must not leave a member without a reader
                log.error("tokens.failed", exc_info=error)
                reason = HalfmoonError("internal error: see the gateway's log")
            if worker.member.listening:
                num_failures = 0
                self.membership.set_listening(worker.member, False)
                self.router.lose(worker.member.worker_id, Unavailable(reason.message))
            fields = {"worker_id": worker.member.worker_id, "reason": reason.message}
            log.warning("tokens.lost", extra=fields)
            await asyncio.sleep(RETRY_S[min(num_failures, len(RETRY_S) - 1)])
            num_failures += 1

    async def _read_token_stream(self, worker: Worker) -> None:
        request = TokensRequest(gateway_id=self.gateway_id)
        async with worker.peer.stream(worker.decode.Tokens, request, deadline_s=LONG_LIVED_S) as steps:
            async for step in steps:
                if not worker.member.listening:
                    self.membership.set_listening(worker.member, True)
                    self._notify()
                self.router.deliver(step, self.clock())

    async def _close_later(self, worker: Worker) -> None:
        """Closes the connection after a while: cancellations for the worker's requests still have to get through."""
        try:
            await asyncio.wait_for(self._closing.wait(), DEADLINE_S)
        except TimeoutError:
            pass
        finally:
            await worker.peer.close()


@asynccontextmanager
async def running_cluster(
    gateway_id: str,
    membership: Membership,
    credential: Credential | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster whose tasks end with the block. An error of the block is raised as it is, not as a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            cluster = Cluster(gateway_id, membership, tasks, credential)
            duties = [tasks.create_task(work) for work in (cluster.watch_heartbeats(), cluster.announce_members())]
            try:
                yield cluster
            finally:
                for duty in duties:
                    duty.cancel()
                await cluster.close(grace_s=1.0)
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
