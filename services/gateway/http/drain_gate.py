"""Stops accepting requests at shutdown, and waits for those that are running."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from halfmoon.errors import Unavailable


class DrainGate:
    """Owns whether the gateway accepts requests, how many are running, and how long they may go on after the end.

    `drain_s` may be shortened as long as the gate is open.
    """

    def __init__(self, drain_s: float = 0.0) -> None:
        self.drain_s = drain_s
        self._closed = False
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed

    @property
    def num_inside(self) -> int:
        """Running requests."""
        return self._num_inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Counts a running request inside the block. Raises Unavailable once the gate is closed."""
        if self._closed:
            raise Unavailable("the gateway is shutting down", retry_after_ms=1_000)
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    def close(self) -> None:
        """Refuses new requests from now on."""
        self._closed = True

    async def until_empty(self, timeout_s: float) -> bool:
        """Waits for the running requests to end; False if some still run after `timeout_s`."""
        if not self._num_inside:
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
