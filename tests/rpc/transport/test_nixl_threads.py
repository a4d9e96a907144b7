"""NIXL pulls for several transfers at once, on threads of their own: they share one agent."""

from __future__ import annotations

import asyncio
import threading
from importlib.util import find_spec

import pytest

from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.rpc.transport.nixl import NixlInlet, _Puller
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, Ends, ends, kv_of, until

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")

SETTINGS = LinkSettings(transports=("nixl",))


async def transferred(it: Ends, name: bytes, seed: int) -> bool:
    kv = kv_of(seed)
    async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
        await transfer.open(WHOLE, name)
        for part, payload in zip(LAYERS, kv, strict=True):
            await transfer.data(part, payload)
        await transfer.commit(b"")
        assert transfer.transport == "nixl"
    return bool((it.sink.got(name) == kv).all())


async def test_many_transfers_at_once() -> None:
    """Without locks in the agent this ends the process, not the test."""
    async with ends(SETTINGS) as it:
        for turn in range(5):
            names = [b"%d %d" % (turn, number) for number in range(24)]
            assert all(await asyncio.gather(*(transferred(it, name, seed) for seed, name in enumerate(names))))


async def test_memory_of_a_transfer_that_ended_in_the_midst_of_a_pull_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inlet, pulling, go_on = NixlInlet(), threading.Event(), threading.Event()
    read = _Puller._read

    def held_up(self: _Puller, address: int, num_bytes: int) -> None:
        pulling.set()
        assert go_on.wait(20)
        read(self, address, num_bytes)

    async with ends(SETTINGS, [inlet]) as it:
        with monkeypatch.context() as patch:
            patch.setattr(_Puller, "_read", held_up)
            async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
                await transfer.open(WHOLE, b"ended")
                await transfer.data(LAYERS[0], kv_of(1)[0])
                await until(pulling.is_set)
            await until(lambda: not it.sink.running)
            assert not inlet._rooms
            go_on.set()
            await until(lambda: len(inlet._rooms) == 1)
        assert await transferred(it, b"after", 2)
        await until(lambda: len(inlet._rooms) == 1)
        assert not inlet._lost
