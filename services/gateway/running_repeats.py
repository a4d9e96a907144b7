"""The running requests that have an id of their client: each is answered on one connection at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from services.gateway.cluster.token_router import TakenOver
from services.gateway.http.request_ids import ReusedKey
from services.gateway.repeatable import RepeatableRequest

Answer = Callable[[], Coroutine[Any, Any, web.StreamResponse]]


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    request: RepeatableRequest
    task: asyncio.Task[web.StreamResponse]


class RunningRepeats:
    """Owns the running repeatable requests of this gateway, by key. A newer one with the same key takes over."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: how long an answer that has begun goes on after its client has left."""
        self._grace_s = grace_s
        self._running: dict[bytes, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def run(
        self, request: RepeatableRequest, answer: Answer, has_begun: Callable[[], bool]
    ) -> web.StreamResponse:
        """Answers a request, in a task that outlives its client for a while.

        Raises ReusedKey while a request with the same key and another body is running, and TakenOver when a newer
        request has taken the answer over.
        """
        await self._take_over(request)
        task = asyncio.create_task(answer())
        running = self._running[request.key] = _Running(request, task)
        task.add_done_callback(lambda _: self._remove(running))
        try:
            await self._until_done(task, has_begun)
        finally:
            if not task.done():  # a client that leaves as its answer ends has had it
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            return task.result()
        raise TakenOver if request.is_taken_over else asyncio.CancelledError

    async def _until_done(self, task: asyncio.Task[web.StreamResponse], has_begun: Callable[[], bool]) -> None:
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # the client has left
            if has_begun() and not task.done():
                await asyncio.wait({task}, timeout=self._grace_s)

    async def _take_over(self, request: RepeatableRequest) -> None:
        while (older := self._running.get(request.key)) is not None:
            if older.request.body_digest != request.body_digest:
                raise ReusedKey
            if not older.request.take_over():
                older.task.cancel()
            await asyncio.wait({older.task})
            self._remove(older)

    def _remove(self, running: _Running) -> None:
        if self._running.get(running.request.key) is running:
            del self._running[running.request.key]
