"""Running answers move to another decode worker when theirs drains, and back to a new one: no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.rpc.control_api import ControlApi, Worker
from tests.e2e.system import running_system
from tests.e2e.test_life import CONSTRAINED, begun_streams, whole

pytestmark = pytest.mark.e2e

PLAIN: dict[str, Any] = {"model": "demo", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
NUM_TRIES = 4
TEXT = "The moon rose over the quiet harbour, and the fishermen counted their boats before the tide. "
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "logprobs": 2, "frequency_penalty": 0.3}
BODIES = [
    PLAIN | {"prompt": "The moon is"},
    PLAIN | {"prompt": TEXT * 6},
    PLAIN | SEEDED | {"prompt": TEXT},
    CONSTRAINED | {"prompt": f"{TEXT} Numbers:"},
]


def num_ready(workers: Sequence[Worker]) -> int:
    return sum(one["role"] == "decode" and not one["load"]["draining"] for one in workers)


async def move_reasons(http: aiohttp.ClientSession) -> dict[str, int]:
    """How often moves ended for each reason."""
    async with http.get("/halfmoon/v1/cache") as response:
        decisions = (await response.json())["decisions"]
    return {one["reason"]: one["count"] for one in decisions if one["decision"] == "move"}


async def test_answers_move_and_stay_the_same(tmp_path: Path) -> None:
    """Where a busy machine ends the answers before they can move, others are begun once the worker is back."""
    options = ("--dtype", "float32", "--prefill", "1", "--decode", "2")
    async with running_system(tmp_path, *options) as system, aiohttp.ClientSession(system.url) as http:
        api = ControlApi(http, "", "test")
        undisturbed = [*await asyncio.gather(*(whole(http, body) for body in BODIES))]
        for _ in range(NUM_TRIES):
            await api.until(lambda workers: num_ready(workers) == 2, 60, "no second decode worker")
            streams = await begun_streams(http, BODIES)
            while not (
                busy := [one for one in await api.workers() if one["role"] == "decode" and one["load"]["num_running"]]
            ):
                assert not all(stream.done() for stream in streams), "no report showed who decodes"
                await asyncio.sleep(0.02)
            busiest = max(busy, key=lambda one: one["load"]["num_running"])
            await api.change(busiest["worker_id"], "drain", {"returns": True})
            assert await asyncio.gather(*streams) == undisturbed
            async with http.get(f"/halfmoon/v1/requests?limit={len(BODIES)}") as response:
                assert not any(row["num_retries"] for row in await response.json())
            reasons = await move_reasons(http)
            if reasons.get("moved"):
                break
    assert reasons.get("moved"), reasons
