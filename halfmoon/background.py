"""Background tasks that never outlive their scope, and how they learn of changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Changes:
    """Tells all tasks that wait of the next change. Event-loop thread only."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Ends all waits that have begun."""
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> Coroutine[Any, Any, object]:
        """An awaitable that is done at the first change after this call."""
        return self._next.wait()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs `work` while inside; it has ended outside. Its error is raised only to those who await the task."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancelled(task)


async def logged(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` and logs its failure, which ends nothing else and which no one awaits."""
    try:
        await work
    except Exception as error:
        log.error("task.failed", exc_info=error)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancels `task` and returns when it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A cancelled wait ends with the work, which goes on to its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # whoever waited for it has left
        raise


async def first_result(wanted: asyncio.Future[T], *others: asyncio.Future[Any]) -> T:
    """The result of `wanted`; raises the error of any of the others as soon as it occurs."""
    waiting: set[asyncio.Future[Any]] = {wanted, *others}
    while not wanted.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for other in done - {wanted}:
            other.result()
    return wanted.result()
