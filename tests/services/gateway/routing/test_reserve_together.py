"""The outputs of one request are reserved all or none, and others are served meanwhile."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from halfmoon.errors import Unavailable
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.routing.reserve_together import reserve_together
from services.gateway.routing.routing_context import RoutingContext


class Reserved:
    """An output that counts who is reserved."""

    def __init__(self, names: list[int], name: int, fails_at: int | None = None) -> None:
        self._names = names
        self._name = name
        self._fails_at = fails_at

    def reserve(self, *, is_probe: bool = False) -> None:
        if self._name == self._fails_at:
            raise Unavailable("nobody")
        self._names.append(self._name)

    def release(self) -> None:
        if self._name in self._names:
            self._names.remove(self._name)


def outputs(names: list[int], num: int, fails_at: int | None = None) -> list[RequestRouting]:
    return [cast(RequestRouting, Reserved(names, number, fails_at)) for number in range(num)]


async def test_others_are_served_between_the_reservations_of_many() -> None:
    reserved, seen = list[int](), list[int]()

    async def look_on() -> None:
        while len(reserved) < 100:
            seen.append(len(reserved))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look_on())
    await reserve_together(cast(RoutingContext, None), outputs(reserved, 100))
    await looking
    assert reserved == list(range(100))
    assert len(seen) > 10


async def test_none_stays_reserved_if_one_has_no_place() -> None:
    reserved = list[int]()
    with pytest.raises(Unavailable):
        await reserve_together(cast(RoutingContext, None), outputs(reserved, 100, fails_at=70))
    assert reserved == []
