"""Running answers leave busy decode workers for others where that saves more than it costs: looks once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from halfmoon.policy.placement.hot_spots import LOOK_S, HotSpots, RunningAnswer
from halfmoon.policy.values import Placement
from services.gateway.routing.routing_context import RoutingContext

log = logging.getLogger(__name__)


class Movable(Protocol):
    """An attempt whose answer may go on elsewhere."""

    def running_answer(self) -> RunningAnswer | None:
        """How far its answer is; None while it cannot move."""

    def move_to(self, placement: Placement) -> None:
        """Prepares to go on there."""


class HotSpotWatch:
    """Owns the running attempts that may move."""

    def __init__(self, context: RoutingContext) -> None:
        self._context = context
        self._policy = HotSpots()
        self._running: set[Movable] = set()

    @contextmanager
    def watching(self, attempt: Movable) -> Iterator[None]:
        """Inside the block, the attempt's answer may move."""
        self._running.add(attempt)
        try:
            yield
        finally:
            self._running.discard(attempt)

    async def follow(self) -> None:
        """Looks every second, forever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Begins the moves that pay now."""
        view, now_s = self._context.membership.view(), self._context.clock()

        def name_of(row: int) -> str:
            return view.worker(row).worker_id

        answers = {answer.name: (answer, one) for one in self._running if (answer := one.running_answer()) is not None}
        given = [answer for answer, _ in answers.values()]
        for move in self._policy.choose(view, given, lambda row: self._context.same_kv(name_of(row)), now_s):
            before = name_of(answers[move.name][0].row)
            fields = {"before": before, "after": move.placement.decode.worker_id}
            log.info("hot_spot.moves", extra={**fields, "gain_s": move.gain_s, "cost_s": move.cost_s})
            answers[move.name][1].move_to(move.placement)
