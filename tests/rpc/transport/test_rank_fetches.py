"""Channels to ranks of other workers: bounded, and none is closed while it brings something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import Unavailable
from halfmoon.kv.kv_layout import Shard
from halfmoon.kv.staged_shards import RankShard, StagedShards, Ticket
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transport import rank_fetches
from halfmoon.rpc.transport.rank_fetches import RankFetches, RankKVServicer

PLACE = Shard(0, 1, 0, 1)
TICKET, KEPT_AS = Ticket(b"a link's", 0), Ticket(b"transfer", 0)


class Source:
    """A host that keeps one part, and gives it once it `may`."""

    def __init__(self) -> None:
        self.staged = StagedShards()
        self.staged.put(TICKET, 0, PLACE, np.ones((1, 2, 1, 1, 4), np.uint8), 0.0)
        self.asked, self.may = asyncio.Event(), asyncio.Event()
        self.address = ""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Source]:
        source = self

        class Waiting(RankKVServicer):
            async def read(self, message: bytes, context: object) -> bytes:
                source.asked.set()
                await source.may.wait()
                return await super().read(message, context)

        servicer = Waiting(self.staged, RankFetches(self.staged))
        metrics = RpcMetrics(CollectorRegistry())
        async with running_server("127.0.0.1:0", servicer.registrations(), metrics, grace_s=0) as server:
            self.address = f"127.0.0.1:{server.port}"
            yield self


async def fetched(fetches: RankFetches, source: Source, rank: int) -> None:
    place = RankShard(0, PLACE, source.address)
    await fetches.fetch([place], TICKET, RankShard(rank, PLACE), 1, KEPT_AS)


async def test_a_channel_that_is_not_the_latest_brings_what_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fetches, "_MAX_IDLE", 1)
    kept = StagedShards()
    fetches = RankFetches(kept)
    async with Source().served() as slow, Source().served() as quick:
        quick.may.set()
        waiting = asyncio.create_task(fetched(fetches, slow, 1))
        await slow.asked.wait()
        for _ in range(3):
            await fetched(fetches, quick, 2)
        slow.may.set()
        await waiting
        assert kept.take(KEPT_AS, 1) == kept.take(KEPT_AS, 2) == bytes(8 * [1])
        await fetches.close()


async def test_a_fetch_that_is_cancelled_leaves_a_channel_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_fetches, "_MAX_IDLE", 0)
    kept = StagedShards()
    fetches = RankFetches(kept)
    async with Source().served() as slow:
        waiting = asyncio.create_task(fetched(fetches, slow, 1))
        await slow.asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert kept.num_bytes == 0
        slow.may.set()
        await fetched(fetches, slow, 1)
        assert kept.num_bytes == 8
        await fetches.close()


async def test_channels_to_sources_that_are_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[str]()

    class Gone:
        def __init__(self, address: str, *of_no_use: object) -> None:
            self.address, self.channel = address, self

        def unary_unary(self, method: str) -> None:
            """Nothing is called."""

        async def call(self, *of_no_use: object, deadline_s: float) -> bytes:
            raise Unavailable(f"{self.address} is gone")

        async def close(self) -> None:
            closed.append(self.address)

    monkeypatch.setattr(rank_fetches, "Peer", Gone)
    monkeypatch.setattr(rank_fetches, "_MAX_IDLE", 1)
    fetches = RankFetches(StagedShards())
    for address in ("a:1", "b:1", "c:1"):
        with pytest.raises(Unavailable):
            await fetches.reach([address])
    assert closed == ["a:1", "b:1"]


async def test_a_source_that_is_gone_is_named() -> None:
    fetches = RankFetches(StagedShards())
    async with Source().served() as source:
        pass
    with pytest.raises(Unavailable):
        await fetched(fetches, source, 0)
    with pytest.raises(Unavailable):
        await fetches.reach([source.address])
    await fetches.close()
