"""The autopilot of `halfmoon up`: it advises, acts when told, loses nothing, and lets a person's change stand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.rpc.control_api import ControlApi
from tests.e2e.system import running_system
from tests.e2e.test_life import whole

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 10
SLOW_PREFILL = {
    "prefill": [0.01, 3e-3, 0.0], "step": [0.002, 1e-5, 0.0], "kv_tokens": 200_000, "kv_token_bytes": 1024,
    "max_batch_tokens": 4096, "chunk_tokens": 512, "max_running": 64,
}  # fmt: skip
PATH = "/halfmoon/v1/autopilot"


def body(client: int, turn: int) -> dict[str, Any]:
    """A prompt that takes about a second, begins like no other, and has a short answer."""
    prompt = f"{client} {turn} " + "The moon rose over the quiet harbour. " * 40
    return {"model": "demo", "prompt": prompt, "max_tokens": 5, "ignore_eos": True, "seed": client}


@asynccontextmanager
async def asking(http: aiohttp.ClientSession) -> AsyncIterator[dict[tuple[int, int], str]]:
    """Clients that ask one question after the other; what they were answered, complete behind the block."""
    texts, is_over = dict[tuple[int, int], str](), asyncio.Event()

    async def ask_on(client: int) -> None:
        turn = 0
        while not is_over.is_set():
            texts[client, turn] = await whole(http, body(client, turn))
            turn += 1

    clients = [asyncio.create_task(ask_on(client)) for client in range(NUM_CLIENTS)]
    try:
        yield texts
        is_over.set()
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()


async def decided(api: ControlApi, is_it: Callable[[Any], bool]) -> Any:
    """Waits for a decision of this kind, the oldest one."""
    while True:
        decisions = (await api.get(f"{PATH}?limit=1000"))["decisions"]
        if found := [decision for decision in decisions if is_it(decision)]:
            return found[-1]
        await asyncio.sleep(0.2)


async def roles(api: ControlApi) -> dict[str, str]:
    return {worker["worker_id"]: worker["role"] for worker in await api.workers()}


@pytest.mark.timeout(600)
async def test_it_acts_when_told_loses_nothing_and_lets_a_persons_change_stand(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(SLOW_PREFILL))
    settings = (f"simulation.profile={profile}", "gateway.role_dwell_s=0", "planner.autopilot_dwell_s=0")
    options = ("--engine", "sim", "--prefill", "1", "--decode", "3", *(f"--set={value}" for value in settings))
    async with running_system(tmp_path / "state", *options) as system, aiohttp.ClientSession(system.url) as http:
        api = ControlApi(http, "", "ann")
        before = await roles(api)
        async with asking(http) as texts:
            advice = await decided(api, lambda one: one["action"] == "change_role")
            assert (advice["mode"], advice["outcome"], advice["after"]) == ("observe", "advised", "prefill")
            assert await roles(api) == before

            await api.put(PATH, {"mode": "act", "version": 0})
            first = await decided(api, lambda one: one["outcome"] == "done")
            assert (first["before"], first["after"]) == ("decode", "prefill")
            assert first["predicted_prefill"] < first["prefill"]
            measured = await decided(api, lambda one: one["outcome"] == "done" and one["measured_at"] is not None)
            assert measured["worker_id"] == first["worker_id"]
            assert measured["measured_prefill"] is not None

            name = first["worker_id"]  # a person takes the change back; the others are to follow the traffic
            await api.change(name, "role", {"role": "decode", "force": True})
            wanted = {other: "decode" if other == name else "prefill" for other in before}
            while await roles(api) != wanted:
                await asyncio.sleep(0.2)
        await api.put(PATH, {"mode": "off", "version": 1})
        changes: Any = await api.get("/halfmoon/v1/worker_changes?limit=1000")
        assert [(one["changed_by"], one["after"]) for one in reversed(changes) if one["worker_id"] == name] == [
            ("autopilot", "prefill"),
            ("ann", "decode"),
        ]
        rows: Any = await api.get("/halfmoon/v1/requests?limit=1000")
        assert {row["status"] for row in rows} == {"ok"}
        keys = list(texts)[:: max(len(texts) // NUM_CLIENTS, 1)]
        again = await asyncio.gather(*(whole(http, body(*key)) for key in keys))
        assert [texts[key] for key in keys] == again
