"""Tells workers that requests have ended, until they know: otherwise they would compute them to their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import chain, repeat
from typing import Any, TypeAlias

from google.protobuf.message import Message

from halfmoon.errors import HalfmoonError
from halfmoon.pb.decode_pb2 import CancelRequest, SettleRequest
from halfmoon.rpc.context import request_id, request_scope
from services.gateway.cluster.token_router import GatewayStopping
from services.gateway.cluster.worker import Worker

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
RETRY_S = (0.05, 0.2, 0.5, 1.0)  # pauses between tries to reach a worker; the last one repeats

# Runs work in a task of its own. Raises GatewayStopping at the very end.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class RequestEnds:
    """Owns the messages that workers have yet to get."""

    def __init__(self, gateway_id: str, spawn: Spawn) -> None:
        self._gateway_id = gateway_id
        self._spawn = spawn
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling: set[str] = set()

    @property
    def settling(self) -> frozenset[str]:
        """Answers that have ended here, on their workers by these ids, which the workers may not know yet."""
        return frozenset(self._settling)

    def cancel(self, worker: Worker, wire_id: str) -> None:
        """Sends Decode.Cancel, even past the end of the request and its deadline."""
        self._send(worker, wire_id, worker.decode.Cancel, CancelRequest)

    def settle(self, worker: Worker, wire_id: str) -> None:
        """Sends Decode.Settle, likewise."""
        task = self._send(worker, wire_id, worker.decode.Settle, SettleRequest)
        if task is not None:
            self._settling.add(wire_id)
            task.add_done_callback(lambda _: self._settling.discard(wire_id))

    async def close(self, grace_s: float) -> None:
        """Gives what is under way `grace_s` to arrive."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        for task in self._tasks:
            task.cancel()

    def _send(
        self,
        worker: Worker,
        wire_id: str,
        method: Callable[..., Any],
        kind: type[CancelRequest] | type[SettleRequest],
    ) -> asyncio.Task[None] | None:
        request = kind(request_ids=[wire_id], gateway_id=self._gateway_id)
        with suppress(GatewayStopping):  # the workers notice that this gateway has ended
            task = self._spawn(self._deliver(worker, wire_id, method, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task
        return None

    async def _deliver(self, worker: Worker, wire_id: str, method: Callable[..., Any], request: Message) -> None:
        """Tries until the worker has received it or has left."""
        with request_scope(request_id()):  # the request's own deadline may be over
            for pause_s in chain(RETRY_S, repeat(RETRY_S[-1])):
                try:
                    await worker.peer.call(method, request, deadline_s=DEADLINE_S)
                    return
                except HalfmoonError as error:
                    fields = {"worker_id": worker.member.worker_id, "wire_id": wire_id, "reason": error.message}
                    log.warning("cancel.failed", extra=fields)
                if worker.gone.done():
                    return
                await asyncio.sleep(pause_s)
