"""Whose turn it is: a few jobs run, a few wait in the order of coming, more are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from halfmoon.errors import NoCapacity

_RETRY_AFTER_MS = 10_000


class Ticket:
    """One job's place in the line."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()  # the line has, since this was cleared


class Turns:
    """Owns the line. The first `most_running` of it run."""

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._line: list[Ticket] = []

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """A place as long as the block lasts. Raises NoCapacity where too many wait already."""
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
            for one in self._line:
                one.moved.set()

    def num_ahead(self, ticket: Ticket) -> int:
        """Jobs that have to end first; 0: it is this one's turn, and stays so."""
        return max(self._line.index(ticket) + 1 - self._most_running, 0)
