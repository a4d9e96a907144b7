"""Many placements at once leave time for others."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from services.gateway.routing.placement_turns import PlacementTurns


async def test_others_run_between_the_placements_of_many() -> None:
    turns, placed, others = PlacementTurns(most=2), list[int](), list[int]()

    async def place(number: int) -> None:
        await turns.mine()
        placed.append(number)

    async def look_on() -> None:
        while len(placed) < 7:
            others.append(len(placed))
            await asyncio.sleep(0)

    waiting = [asyncio.create_task(place(number)) for number in range(8)]
    looking = asyncio.create_task(look_on())
    await asyncio.sleep(0)
    waiting[5].cancel()
    await asyncio.gather(*waiting[:5], *waiting[6:], looking)
    assert placed == [0, 1, 2, 3, 4, 6, 7]
    assert {2, 4} < set(others)
    assert all(after - before <= 2 for before, after in pairwise(others))


async def test_a_placement_alone_does_not_wait() -> None:
    turns = PlacementTurns(most=1)
    for _ in range(3):
        coroutine = turns.mine()
        try:
            coroutine.send(None)
        except StopIteration:
            await asyncio.sleep(0)
            continue
        raise AssertionError("it waits")
