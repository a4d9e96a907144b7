"""Who compiles next: tenants take turns, and nobody waits without bound."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from halfmoon.errors import Unavailable
from services.gateway.sandbox.tenant_turns import TenantTurns

LONG_S = 60.0


class Checks:
    """Owns checks that take as long as the test wants, and the order in which they began."""

    def __init__(self, num_places: int = 2) -> None:
        self.turns = TenantTurns(num_places)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def ask(self, *names: str) -> list[asyncio.Task[None]]:
        """Asks for a turn each; the first letter is the tenant."""
        tasks = [asyncio.create_task(self._run(name)) for name in names]
        await self.settle()
        return tasks

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        self._ends[name] = asyncio.Event()
        async with self.turns.turn(name[0], LONG_S):
            self.begun.append(name)
            await self._ends[name].wait()


async def test_one_tenants_queue_is_not_anothers() -> None:
    checks = Checks()
    await checks.ask(*(f"a{number}" for number in range(8)))
    await checks.ask("b0")
    assert checks.begun == ["a0", "a1"]
    await checks.end("a0")
    assert checks.begun == ["a0", "a1", "b0"]
    await checks.ask("b1", "c0")
    await checks.end("b0")
    assert checks.begun[3:] == ["b1"], "a has a place"
    await checks.end("a1")
    assert checks.begun[4:] == ["a2"], "one place each"
    await checks.end("b1")
    assert checks.begun[5:] == ["c0"]
    for name in ("c0", "a2", "a3"):
        await checks.end(name)
    assert checks.begun[6:] == ["a3", "a4", "a5"], "all places are its own while nobody else waits"


async def test_who_waits_too_long_is_told_to_come_back() -> None:
    turns = TenantTurns(1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("a", LONG_S))
        with pytest.raises(Unavailable, match="try again") as refusal:
            await stack.enter_async_context(turns.turn("b", 0.0))
        assert refusal.value.retry_after_ms
    async with turns.turn("b", 0.0):
        pass


async def test_who_leaves_while_waiting_takes_no_place_along() -> None:
    checks = Checks(1)
    await checks.ask("a0")
    waiting = await checks.ask("b0", "c0")
    waiting[0].cancel()
    await checks.end("a0")
    assert checks.begun == ["a0", "c0"]
    (granted,) = await checks.ask("d0")
    checks._ends["c0"].set()
    await asyncio.sleep(0)
    granted.cancel()  # as its turn comes
    await checks.settle()
    await checks.ask("e0")
    assert checks.begun[-1] == "e0"
