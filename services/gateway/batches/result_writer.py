"""Writes the results of a batch's lines: those that come together in one transaction."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, NotFound, Unavailable
from halfmoon.ledger.kept.batches import Batches, LineResult

log = logging.getLogger(__name__)

_MOST_ROWS = 100  # in one transaction
_MOST_WAITING = 200
_RETRY_S = 1.0
_LAST_S = 5.0


class LeaseLost(NotFound):
    """Another gateway has the batch, or it is gone."""


class ResultWriter:
    """Owns the results that are not written yet. While the ledger is away no more lines begin."""

    def __init__(self, batches: Batches, batch_id: str, holder: str) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._holder = holder
        self._queue: asyncio.Queue[LineResult | None] = asyncio.Queue(_MOST_WAITING)
        self._error: HalfmoonError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns once everything is written; raises LeaseLost. A failed or cancelled one has a few seconds for it."""
        assert self._task is not None
        closing = asyncio.create_task(self._close(self._task))
        await asyncio.wait({closing}, timeout=None if error is None else _LAST_S)
        for task in (closing, self._task):
            await cancelled(task)
        if self._error is not None and error is None:
            raise self._error

    async def put(self, result: LineResult) -> None:
        """Takes a result. Raises LeaseLost."""
        if self._error is not None:
            raise self._error
        await self._queue.put(result)

    async def _close(self, writing: asyncio.Task[None]) -> None:
        await self._queue.put(None)
        await asyncio.wait({writing})

    async def _write(self) -> None:
        is_open = True
        while is_open:
            results = [await self._queue.get()]
            while len(results) < _MOST_ROWS and not self._queue.empty():
                results.append(self._queue.get_nowait())
            is_open = None not in results
            if self._error is None:
                await self._add([result for result in results if result is not None])

    async def _add(self, results: list[LineResult]) -> None:
        while results:
            try:
                if not await self._batches.add_results(self._batch_id, self._holder, results):
                    self._error = LeaseLost("another gateway has this batch")
                return
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
            except Exception:  # no driver error may leave the lines waiting
                log.exception("batch.not_written", extra={"batch_id": self._batch_id})
                self._error = HalfmoonError("the ledger refused results of the batch")
                return
