"""A transfer that is over lets its call go: as long as that lives, gRPC keeps the connection of a closed channel."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.link import LinkSettings
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, Ends, ends, kv_of, until


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def ended(it: Ends, *, commits: bool) -> weakref.ref[Any]:
    async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
        await transfer.open(WHOLE, b"1")
        for part, payload in zip(LAYERS, kv_of(1), strict=True):
            await transfer.data(part, payload)
        if commits:
            await transfer.commit(b"")
        return weakref.ref(transfer._call)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("transports", [(), ("shm",)], ids=["grpc", "shm"])
@pytest.mark.parametrize("commits", [True, False], ids=["committed", "given up"])
async def test_its_call_goes_at_once(transports: tuple[str, ...], commits: bool) -> None:
    async with ends(LinkSettings(transports=transports)) as it:
        call = await ended(it, commits=commits)
        await until(lambda: call() is None)
