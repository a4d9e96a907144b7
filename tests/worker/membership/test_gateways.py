"""A worker's gateways, named one by one or by names that stand for several. The resolver is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from halfmoon.errors import Incompatible
from halfmoon.worker.membership.gateways import Gateways
from halfmoon.worker.membership.registration import Registration


class FakeRegistration:
    """Lasts until it is lost, and begins again while it is wanted."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_wanted = True
        self.num_reports = 0
        self.lost = asyncio.Event()
        self.refusal: Exception | None = None
        self.has_begun = self.has_left = False

    def report_now(self) -> None:
        self.num_reports += 1

    def leave(self) -> None:
        self.is_wanted, self.has_left = False, True

    async def run(self) -> None:
        self.has_begun = True
        while self.is_wanted:
            await self.lost.wait()
            self.lost.clear()
            if self.refusal is not None:
                raise self.refusal


class World:
    """What names stand for, and the registrations that a worker made of them."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        self.made: list[FakeRegistration] = []
        self.left: list[str] = []
        self.num_resolved = 0
        self.gateways: Gateways

    async def resolve(self, name: str) -> set[str]:
        self.num_resolved += 1
        if name not in self.names:
            raise OSError(f"{name} is unknown")
        return self.names[name]

    def register(self, address: str) -> Registration:
        self.made.append(FakeRegistration(address))
        return cast(Registration, self.made[-1])

    async def leave(self, address: str) -> None:
        self.left.append(address)

    @property
    def addresses(self) -> list[str]:
        return [registration.address for registration in self.made]

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 (a fake has no event)
                await asyncio.sleep(0)

    async def resolved_again(self) -> None:
        """Returns once names were resolved after this call, and what they stand for has counted."""
        seen = self.num_resolved
        await self.until(lambda: self.num_resolved > seen + 2 * len(self.names) + 2)


@asynccontextmanager
async def running(*named: str, **names: set[str]) -> AsyncIterator[World]:
    world = World()
    world.names = {name.replace("_", ":"): found for name, found in names.items()}
    world.gateways = Gateways(named, world.register, world.leave, world.resolve, resolve_s=0.0)
    task = asyncio.create_task(world.gateways.run())
    try:
        yield world
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_name_stands_for_all_its_addresses() -> None:
    async with running("gw:7", gw_7={"10.0.0.1:7", "10.0.0.2:7"}) as world:
        await world.until(lambda: world.gateways.most == 2)
        assert world.addresses == ["10.0.0.1:7", "10.0.0.2:7"]
        assert [one.num_reports for one in world.made] == [1, 1]  # how many there are is news


async def test_a_gateway_that_comes_is_found_and_one_that_goes_is_left_once_it_has_ended() -> None:
    async with running("gw:7", gw_7={"10.0.0.1:7"}) as world:
        await world.until(lambda: world.made)
        world.names["gw:7"] = {"10.0.0.2:7"}
        await world.until(lambda: world.addresses == ["10.0.0.1:7", "10.0.0.2:7"])
        assert not world.left  # it may be draining, and its requests run here
        world.made[0].lost.set()
        await world.until(lambda: world.left == ["10.0.0.1:7"])
        world.made[1].lost.set()
        await world.resolved_again()
        assert (world.left, len(world.made)) == (["10.0.0.1:7"], 2)  # it registers again by itself
        assert world.gateways.most == 2


async def test_a_gateway_that_its_name_stands_for_again_is_kept() -> None:
    async with running("gw:7", gw_7={"10.0.0.1:7"}) as world:
        await world.until(lambda: world.made)
        world.names["gw:7"] = {"10.0.0.2:7"}
        await world.until(lambda: not world.made[0].is_wanted)
        world.names["gw:7"] = {"10.0.0.1:7"}
        await world.until(lambda: world.made[0].is_wanted)
        world.made[0].lost.set()
        await world.resolved_again()
        assert (world.left, world.addresses) == ([], ["10.0.0.1:7", "10.0.0.2:7"])


async def test_while_a_name_cannot_be_resolved_its_gateways_stay(caplog: pytest.LogCaptureFixture) -> None:
    async with running("gw:7", "other:7", gw_7={"10.0.0.1:7"}) as world:
        await world.until(lambda: world.made)
        del world.names["gw:7"]
        await world.resolved_again()
        assert world.made[0].is_wanted
        world.names["other:7"] = {"10.0.0.3:7"}
        await world.until(lambda: world.addresses == ["10.0.0.1:7", "10.0.0.3:7"])
    told = [record.__dict__ for record in caplog.records if record.message == "registration.lost"]
    assert [(one["gateway"], one["reason"]) for one in told] == [
        ("other:7", "cannot resolve it: other:7 is unknown"),
        ("gw:7", "cannot resolve it: gw:7 is unknown"),
    ]


async def test_names_of_the_same_gateway_are_one_registration() -> None:
    async with running("gw:7", "10.0.0.1:7", gw_7={"10.0.0.1:7"}, **{"10.0.0.1_7": {"10.0.0.1:7"}}) as world:
        await world.resolved_again()
        assert world.addresses == ["10.0.0.1:7"]


@pytest.mark.parametrize("resolve_s", [0.0, 1000.0])
async def test_it_is_over_when_all_gateways_have_ended_the_registrations_that_it_leaves(resolve_s: float) -> None:
    world = World()
    world.names = {"gw:7": {"10.0.0.1:7", "10.0.0.2:7"}}
    gateways = Gateways(["gw:7"], world.register, world.leave, world.resolve, resolve_s=resolve_s)
    task = asyncio.create_task(gateways.run())
    await world.until(lambda: [one.has_begun for one in world.made] == [True, True])
    gateways.leave()
    world.names["gw:7"].add("10.0.0.3:7")
    world.made[0].lost.set()
    await world.until(lambda: world.left == ["10.0.0.1:7"])
    assert not task.done()
    world.made[1].lost.set()
    await asyncio.wait_for(task, 60)
    assert [one.has_left for one in world.made] == [True, True]


async def test_a_refusal_ends_the_worker() -> None:
    world = World()
    world.names = {"gw:7": {"10.0.0.1:7", "10.0.0.2:7"}}
    gateways = Gateways(["gw:7"], world.register, world.leave, world.resolve, resolve_s=0.0)
    task = asyncio.create_task(gateways.run())
    await world.until(lambda: len(world.made) == 2)
    world.made[0].refusal = Incompatible("another model")
    world.made[0].lost.set()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(task, 60)
    assert caught.group_contains(Incompatible, match="another model")
