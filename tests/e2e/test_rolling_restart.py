"""Every worker is started again under load, one after the other, and no stream is lost or changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.cli.workers.restart import restart_one
from halfmoon.rpc.control_api import ControlApi
from tests.e2e.system import running_system
from tests.e2e.test_life import whole

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 4
QUESTIONS = ("The moon is", "A harbour at night", "Numbers are", "Once upon a time")


def body(client: int, turn: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": f"{turn % 3} {QUESTIONS[client]}",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }


async def test_a_rolling_restart_loses_nothing_and_a_drained_worker_stays_away(tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--prefill", "2", "--decode", "2")
    async with running_system(tmp_path, *options) as system, aiohttp.ClientSession(system.url) as http:
        api, is_over, texts = ControlApi(http, "", "test"), asyncio.Event(), dict[tuple[int, int], str]()
        expected = {(client, turn): await whole(http, body(client, turn)) for client in range(4) for turn in range(3)}

        async def ask_on(client: int) -> None:
            turn = 0
            while not is_over.is_set():
                texts[client, turn] = await whole(http, body(client, turn))
                turn += 1

        asking = [asyncio.create_task(ask_on(client)) for client in range(NUM_CLIENTS)]
        before = {worker["worker_id"]: worker["role"] for worker in await api.workers()}
        for worker_id in before:
            assert await restart_one(api, worker_id, force=False) == worker_id
        after = {worker["worker_id"]: worker["role"] for worker in await api.workers()}
        assert not before.keys() & after.keys()
        assert sorted(before.values()) == sorted(after.values())
        gone = next(worker_id for worker_id, role in after.items() if role == "decode")
        await api.change(gone, "drain", {})
        await api.until(lambda workers: len(workers) == 3, 170, "it has not left")
        is_over.set()
        await asyncio.gather(*asking)
        assert all(text == expected[client, turn % 3] for (client, turn), text in texts.items())
        while not any("it is not started again" in line for line in system.printed):
            await asyncio.sleep(0.05)
        assert len(await api.workers()) == 3
