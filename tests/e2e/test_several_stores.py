"""Two stores, each beside a worker: hot blocks come to the store of the chosen worker, and go when they cool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from halfmoon.rpc.credentials.sources import client_credential
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.up.specs.stores import known_stores
from tests.e2e.small_model import small_model
from tests.e2e.system import System, running_system

pytestmark = pytest.mark.e2e

PATIENCE_S = 90
NUM_AT_ONCE = 8
PROMPT_TOKENS = 29 * 64 + 4  # the rest of a block is no block: an answer adds none of its own to what is copied
OPTIONS = ("--both", "2", "--stores", "2", "--dtype", "float32")


class Stores:
    """Looks into both."""

    def __init__(self, clients: list[KVStoreClient]) -> None:
        self._clients = clients

    async def total(self, field: str) -> int:
        return sum([int(getattr(await client.stats(deadline_s=10), field)) for client in self._clients])


@asynccontextmanager
async def both_stores(state_dir: Path) -> AsyncIterator[Stores]:
    clients = [
        KVStoreClient(address, credential=client_credential("operator", address, state_dir))
        for address in known_stores(state_dir)
    ]
    assert len(clients) == 2
    try:
        yield Stores(clients)
    finally:
        for client in clients:
            await client.close()


async def answer(system: System, session: aiohttp.ClientSession, prompt: list[int]) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with session.post(f"{system.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def test_hot_blocks_are_copied_to_the_chosen_workers_store_and_go_when_they_cool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker stored before the copy came is the store's own, and stays: then the next prompt may tell."""
    monkeypatch.setenv("HALFMOON_KVSTORE_REPLICA_COOL_S", "1")
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        running_system(tmp_path / "state", "--model", str(small_model(tmp_path / "small")), *OPTIONS) as system,
        both_stores(tmp_path / "state") as stores,
        aiohttp.ClientSession() as session,
    ):
        asked = 0
        while not await stores.total("num_cooled_total"):
            prompt = [1000 + 17 * asked + n for n in range(PROMPT_TOKENS)]
            num_stored = await stores.total("num_stored_total")
            alone = await answer(system, session, prompt)  # one worker has it, and is busy with it in a moment
            while await stores.total("num_stored_total") == num_stored:  # once that worker has been idle for a while
                await asyncio.sleep(0.2)
            crowd = await asyncio.gather(*(answer(system, session, prompt) for _ in range(NUM_AT_ONCE)))
            assert {*crowd} == {alone}, "wherever it was computed"
            asked += 1
            while await stores.total("num_replicas"):
                await asyncio.sleep(0.2)
        assert await stores.total("num_replicated_total") >= await stores.total("num_cooled_total")
        assert await stores.total("num_stored_total"), "only what is surplus went"
