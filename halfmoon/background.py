"""Work that runs beside other work, and never outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@asynccontextmanager
async def running(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """`work` runs while inside and has ended outside; what it raises only who asks the task hears."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancelled(task)


async def logged(work: Coroutine[Any, Any, None]) -> None:
    """`work`, whose failure ends nothing but itself: it is written down, since nobody asks for it."""
    try:
        await work
    except Exception as error:
        log.error("task.failed", exc_info=error)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Returns when `task` has ended, by cancellation if need be."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def first_result(wanted: asyncio.Future[T], *others: asyncio.Future[Any]) -> T:
    """What `wanted` gives; before that, raises what any of the others raises as soon as it does."""
    waiting: set[asyncio.Future[Any]] = {wanted, *others}
    while not wanted.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in done - {wanted}:
            one.result()
    return wanted.result()
