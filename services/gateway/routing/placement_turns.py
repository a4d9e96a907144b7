"""Between the placements of many outputs, the event loop does what else there is to do."""

from __future__ import annotations

import asyncio
from collections import deque

_MOST = 4  # placements in one round of the event loop: a millisecond each where many prompts wait


class PlacementTurns:
    """Owns how many placements this round of the event loop has had, and who waits for another round.

    Event-loop thread only.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._num_placed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Returns at once, or in a later round if this one has had its placements."""
        loop = asyncio.get_running_loop()
        if self._num_placed < self._most:
            self._num_placed += 1
            if self._num_placed == 1:
                loop.call_soon(self._begin_round)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _begin_round(self) -> None:
        self._num_placed = 0
        while self._waiting and self._num_placed < self._most:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else it was cancelled
                waiting.set_result(None)
                self._num_placed += 1
        if self._num_placed:
            asyncio.get_running_loop().call_soon(self._begin_round)
