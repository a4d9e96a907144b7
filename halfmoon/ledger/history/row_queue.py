"""Rows written behind the requests, in batches, by one task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from halfmoon.errors import Unavailable

log = logging.getLogger(__name__)

Row = TypeVar("Row")

_MAX_QUEUED = 10_000
_MAX_BATCH = 100  # building a statement then blocks the event loop for about a millisecond
_PAUSE_S = 0.05  # between writes: rows that arrive meanwhile are batched
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


class RowQueue(Generic[Row]):
    """Owns the rows that are not written yet, and the counts of written and lost ones.

    No request waits for it: while the database is down or slow, rows wait, and once `max_queued` do, further ones are
    lost and counted.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Row]], Awaitable[None]],
        max_queued: int = _MAX_QUEUED,
        retry_s: Sequence[float] = _RETRY_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """`write` raises Unavailable if another try may help, an error of SQLAlchemy if not."""
        self._write = write
        self._max_queued = max_queued
        self._retry_s = retry_s
        self._pause_s = pause_s
        self._rows: deque[Row] = deque()
        self._num_alone = 0  # leading rows that are to be written one by one
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_losing = False
        self.num_written = 0
        self.num_lost = 0

    def __len__(self) -> int:
        """Number of rows that are not written yet."""
        return len(self._rows)

    def put(self, row: Row) -> bool:
        """Queues a row for writing. False, and counted as lost, when too many are waiting, or after `close`."""
        if len(self._rows) >= self._max_queued or self._closing.is_set():
            self.num_lost += 1
            if not self._is_losing:  # once per outage, not per row
                log.error("ledger.full", extra={"num_queued": len(self._rows), "num_lost": self.num_lost})
            self._is_losing = True
            return False
        self._rows.append(row)
        self._changed.set()
        return True

    def close(self) -> None:
        """Refuses more rows: `write_behind` returns after the last one, or when the database does not answer."""
        self._closing.set()
        self._changed.set()

    def give_up(self) -> None:
        """Counts the remaining rows as lost."""
        if self._rows:
            log.error("ledger.left", extra={"num_rows": len(self._rows)})
        self.num_lost += len(self._rows)
        self._rows.clear()

    async def write_behind(self) -> None:
        """Writes queued rows until `close`, then the rest."""
        num_failures = 0
        while await self._has_rows():
            began_s = time.monotonic()
            try:
                await self._write_some()
            except Unavailable as error:
                log.error("ledger.failed", extra={"num_queued": len(self._rows), "reason": error.message[:300]})
                if self._closing.is_set() and num_failures:
                    break
                await self._pause(self._retry_s[min(num_failures, len(self._retry_s) - 1)])
                num_failures += 1
                continue
            num_failures, self._is_losing = 0, False
            if len(self._rows) < _MAX_BATCH and not self._num_alone:
                await self._pause(began_s + self._pause_s - time.monotonic())
        self.give_up()

    async def _has_rows(self) -> bool:
        """Waits for rows; False at the end."""
        while not self._rows and not self._closing.is_set():
            self._changed.clear()
            await self._changed.wait()
        return bool(self._rows)

    async def _write_some(self) -> None:
        """Writes the oldest rows. After the database rejects a batch, each of its rows is written, or lost, alone.

        Raises Unavailable; the rows are then kept.
        """
        rows = list(islice(self._rows, 1 if self._num_alone else _MAX_BATCH))
        try:
            await self._write(rows)
        except Unavailable:
            raise
        except Exception as error:  # no driver error may block the rows after these
            is_bug = not isinstance(error, SQLAlchemyError)
            log.error("ledger.refused", extra={"num_rows": len(rows), "reason": str(error)[:300]}, exc_info=is_bug)
            if len(rows) > 1:
                self._num_alone = len(rows)
                return
            self.num_lost += 1
        else:
            self.num_written += len(rows)
        for _ in rows:
            self._rows.popleft()
        self._num_alone = max(0, self._num_alone - len(rows))

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but no longer than until `close`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._closing.wait()
