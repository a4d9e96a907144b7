"""The queue of jobs: a few run, a few wait in order of arrival, more are refused."""

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


class JobQueue:
    """Owns the queue. Its first `most_running` jobs run."""

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._line: list[Ticket] = []

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Holds a place while inside. Raises NoCapacity if too many jobs are waiting."""
        if len(self._line) >= self._most_running + self._most_waiting:
            raise NoCapacity(
                f"{self._most_running} running and {self._most_waiting} waiting is all that this planner takes: "
                "come back later, or give it more with --max-running and --max-waiting",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        ticket = Ticket()
        self._line.append(ticket)
        try:
            yield ticket
        finally:
            self._line.remove(ticket)
            for waiting in self._line:
                waiting.moved.set()

    def num_ahead(self, ticket: Ticket) -> int:
        """Number of jobs that have to end first; 0 from the job's turn on."""
        return max(self._line.index(ticket) + 1 - self._most_running, 0)
