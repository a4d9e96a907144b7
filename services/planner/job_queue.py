"""Queues jobs: a few run, a few wait in the order of arrival, more are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from halfmoon.errors import NoCapacity

_RETRY_AFTER_MS = 10_000


class Ticket:
    """One job's place in the queue."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()  # set when the queue has moved


class Turns:
    """Owns the queue. Its first `most_running` jobs run."""

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._queue: list[Ticket] = []

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Holds a place in the queue for the duration of the block. Raises NoCapacity if too many wait already."""
        if len(self._queue) >= self._most_running + self._most_waiting:
            raise NoCapacity(
                f"{self._most_running} running and {self._most_waiting} waiting is all that this planner takes: "
                "come back later, or give it more with --max-running and --max-waiting",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        ticket = Ticket()
        self._queue.append(ticket)
        try:
            yield ticket
        finally:
            self._queue.remove(ticket)
            for waiting in self._queue:
                waiting.moved.set()

    def num_ahead(self, ticket: Ticket) -> int:
        """Counts the jobs that have to end first. At 0 it is this job's turn, and stays so."""
        return max(self._queue.index(ticket) + 1 - self._most_running, 0)
