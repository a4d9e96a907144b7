"""Workers change their roles there and back under load, and no stream is lost or changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from halfmoon.rpc.control_api import ControlApi
from tests.e2e.system import running_system
from tests.e2e.test_life import whole
from tests.e2e.test_rolling_restart import NUM_CLIENTS, body

pytestmark = pytest.mark.e2e


async def roles(api: ControlApi) -> Counter[str]:
    return Counter(worker["role"] for worker in await api.workers())


async def test_roles_change_there_and_back_under_load(tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--prefill", "1", "--decode", "2", "--set", "gateway.role_dwell_s=0")
    async with running_system(tmp_path, *options) as system, aiohttp.ClientSession(system.url) as http:
        api, is_over, texts = ControlApi(http, "", "test"), asyncio.Event(), dict[tuple[int, int], str]()
        expected = {(client, turn): await whole(http, body(client, turn)) for client in range(4) for turn in range(3)}
        answered = asyncio.Event()

        async def ask_on(client: int) -> None:
            turn = 0
            while not is_over.is_set():
                texts[client, turn] = await whole(http, body(client, turn))
                turn += 1
                answered.set()

        async def served() -> None:
            """Returns after some more answers of every client."""
            num_before = len(texts)
            while len(texts) < num_before + 2 * NUM_CLIENTS:
                answered.clear()
                await answered.wait()

        asking = [asyncio.create_task(ask_on(client)) for client in range(NUM_CLIENTS)]
        (prefill,) = [worker["worker_id"] for worker in await api.workers() if worker["role"] == "prefill"]
        decode = next(worker["worker_id"] for worker in await api.workers() if worker["role"] == "decode")
        pids = {worker["pid"] for worker in await api.workers()}
        for name, role, now in (
            (decode, "prefill", {"prefill": 2, "decode": 1}),
            (prefill, "decode", {"prefill": 1, "decode": 2}),  # they have changed places
            (prefill, "both", {"prefill": 1, "decode": 1, "both": 1}),
            (prefill, "prefill", {"prefill": 2, "decode": 1}),
            (decode, "decode", {"prefill": 1, "decode": 2}),
        ):
            assert (await api.change(name, "role", {"role": role}))["role"] == role
            assert await roles(api) == now
            await served()
        is_over.set()
        await asyncio.gather(*asking)
        assert all(text == expected[client, turn % 3] for (client, turn), text in texts.items())
        assert {worker["pid"] for worker in await api.workers()} == pids
        async with http.get("/halfmoon/v1/worker_changes") as response:
            changes = await response.json()
        async with http.get("/halfmoon/v1/requests?limit=1000") as response:
            statuses = {row["status"] for row in await response.json()}
    assert [change["after"] for change in changes] == ["decode", "prefill", "both", "decode", "prefill"]
    assert statuses == {"ok"}
