"""Serving with any engine: a worker is a member of its gateways until it has drained."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from halfmoon.errors import Unavailable
from halfmoon.pb import decode_pb2_grpc, gateway_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import KV_TRANSFER, PUSH, raw_service
from halfmoon.worker.membership.gateways import Gateways
from halfmoon.worker.membership.registration import Registration
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from halfmoon.worker.servicers.decode_servicer import DecodeServicer
from halfmoon.worker.servicers.prefill_servicer import PrefillServicer
from halfmoon.worker.serving_engine import ServingEngine
from halfmoon.worker.state import WorkerState, now_s

log = logging.getLogger(__name__)

ROLES = {"prefill": types_pb2.PREFILL, "decode": types_pb2.DECODE, "both": types_pb2.BOTH}

_GATEWAY_PATIENCE_S = 5.0  # after this long without reading tokens, a gateway has given up its requests
_SWEEP_S = 1.0
_SETTLE_POLL_S = 0.05


def worker_services(
    prefill: PrefillServicer, decode: DecodeServicer, cache: CacheServicer | None = None
) -> tuple[Callable[[grpc.aio.Server], None], ...]:
    """Services of a worker's server, the same for every role. `cache`: None where no prefix cache can be read."""
    return (
        lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server),
        lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(decode, server),
        raw_service(KV_TRANSFER, {PUSH: decode.push}),
        *(() if cache is None else cache.registrations()),
    )


def role_name(role: types_pb2.Role.ValueType) -> str:
    """The role as settings and policies name it."""
    return types_pb2.Role.Name(role).lower()


class Serving:
    """Owns the tasks of one serving worker. `death` resolves to what killed its engine; `load` makes load reports."""

    def __init__(
        self,
        engine: ServingEngine,
        state: WorkerState,
        load: Callable[[], gateway_pb2.WorkerLoad],
        death: asyncio.Future[BaseException],
        credential: Credential | None = None,
        report_s: float = math.inf,
    ) -> None:
        """See `Registration` for `report_s`."""
        self._engine = engine
        self._state = state
        self._load = load
        self._death = death
        self._credential = credential
        self._report_s = report_s
        self._work: list[Coroutine[Any, Any, None]] = []
        self._report_now: Callable[[], None] = lambda: None  # before it is a member
        self._drain: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether it returns

    def drain(self, returns: bool) -> None:
        """Finishes what was accepted, however long that takes, and ends. Only the first call has an effect.

        returns: its supervisor is to start it again.
        """
        if not self._drain.done():
            self._drain.set_result(returns)

    def change_role(self, change: gateway_pb2.RoleChange) -> None:
        """Serves another role from now on, and reports to all gateways at once, also if the change is stale."""
        role, before = self._state.role, self._state.role.role
        if role.change(change, now_s()):
            names = {"role": role_name(role.role), "before": role_name(before)}
            log.info("worker.role_changed", extra={**names, "epoch": role.epoch})
        self._report_now()

    @property
    def returns(self) -> bool:
        """Whether it drains, and its supervisor is to start it again."""
        return self._drain.done() and self._drain.result()

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` while serving; an error in it ends the worker."""
        self._work.append(work)

    async def until_stopped(
        self,
        gateways: str,
        drain_s: float,
        stopping: asyncio.Future[Any],
        retiring: asyncio.Future[None] | None = None,
    ) -> None:
        """Serves `gateways` until `stopping` is done, then for at most `drain_s` more.

        `gateways`: host:port, comma-separated; a name may stand for several gateways, which come and go.
        `retiring` lets the worker first finish all accepted work, unless `stopping` comes in the meantime. Raises the
        error with which a gateway refuses it, and Unavailable when the engine dies.
        """
        process_key, addresses = secrets.token_bytes(16), [address.strip() for address in gateways.split(",")]
        identity = self._state.identity
        identity.num_gateways, identity.keep_answers_s = len(addresses), self._state.router.kept.keep_s

        def load() -> gateway_pb2.WorkerLoad:
            report = self._load()
            report.num_gateways = members_of.most
            return report

        def registration(address: str) -> Registration:
            return Registration(
                Peer(address, self._credential, "gateway"),
                identity,
                load,
                self._state.cached_blocks.feed(),
                self._state.decode_peers,
                self._state.sources,
                process_key,
                self._report_s,
                self.drain,
                self.change_role,
            )

        members_of = Gateways(addresses, registration, self._left)
        self._report_now = members_of.report_now
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(members_of.run()), group.create_task(self._sweep())]
            tasks.append(group.create_task(self._watch()))
            tasks.extend(map(group.create_task, self._work))
            told = {stopping, retiring or stopping, self._drain}
            await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
            self._state.draining = True
            log.info("worker.draining", extra={"num_running": self._engine.stats_now().num_running})
            members_of.report_now()
            settled = group.create_task(self._settled(members_of, tasks[0]))
            await asyncio.wait({stopping, settled}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({settled}, timeout=drain_s)
            for task in (*tasks, settled):
                task.cancel()
        if self._drain.done():
            log.info("worker.drained", extra={"returns": self.returns})

    async def _left(self, gateway: str) -> None:
        """Forgets what a gateway had named that this worker is no longer a member of."""
        self._state.decode_peers.forget(gateway)
        await self._state.sources.forget(gateway)

    async def _sweep(self) -> None:
        """Cancels the requests of gateways that are gone."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for request_id in self._state.router.abandoned(_GATEWAY_PATIENCE_S):
                log.warning("request.abandoned", extra={"request_id": request_id})
                await self._engine.cancel(request_id)

    async def _watch(self) -> None:
        """Raises if the engine dies, so that the process ends and gateways place requests elsewhere."""
        error = Unavailable(f"the engine of this worker died: {await self._death!r}")
        self._state.router.forget_all(error)
        raise error

    async def _settled(self, members_of: Gateways, membership: asyncio.Task[None]) -> None:
        """Returns when no request is left, blocks for the store are sent, and the gateways have read all tokens."""
        await self._idle()
        await self._state.chains.settled()
        self._state.router.end()
        members_of.leave()
        await asyncio.wait({membership}, timeout=_GATEWAY_PATIENCE_S)

    async def _idle(self) -> None:
        """Returns when no request is left."""
        state = self._state
        while True:
            stats = self._engine.stats_now()
            num_requests = (
                stats.num_running + stats.num_waiting + stats.num_paused + stats.num_reserved + stats.num_held
            )
            if not (num_requests or state.num_calls or state.router.has_pending):
                return
            await asyncio.sleep(_SETTLE_POLL_S)
