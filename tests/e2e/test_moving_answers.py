"""Running answers move to another decode worker when theirs drains, and back to a new one: no text changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.rpc.control_api import ControlApi
from tests.e2e.system import running_system
from tests.e2e.test_life import CONSTRAINED, begun_streams, whole

pytestmark = pytest.mark.e2e

PLAIN: dict[str, Any] = {"model": "demo", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
TEXT = "The moon rose over the quiet harbour, and the fishermen counted their boats before the tide. "
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "logprobs": 2, "frequency_penalty": 0.3}
BODIES = [
    PLAIN | {"prompt": "The moon is"},
    PLAIN | {"prompt": TEXT * 6},
    PLAIN | SEEDED | {"prompt": TEXT},
    CONSTRAINED | {"prompt": f"{TEXT} Numbers:"},
]


async def test_answers_move_and_stay_the_same(tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--prefill", "1", "--decode", "2")
    async with running_system(tmp_path, *options) as system, aiohttp.ClientSession(system.url) as http:
        api = ControlApi(http, "", "test")
        undisturbed = [*await asyncio.gather(*(whole(http, body) for body in BODIES))]
        streams = await begun_streams(http, BODIES)
        while not (
            busy := [one for one in await api.workers() if one["role"] == "decode" and one["load"]["num_running"]]
        ):
            assert not all(stream.done() for stream in streams), "no report showed who decodes"
            await asyncio.sleep(0.02)
        busiest = max(busy, key=lambda one: one["load"]["num_running"])
        await api.change(busiest["worker_id"], "drain", {"returns": True})
        assert await asyncio.gather(*streams) == undisturbed
        async with http.get("/halfmoon/v1/cache") as response:
            reasons = {
                one["reason"]: one["count"] for one in (await response.json())["decisions"] if one["decision"] == "move"
            }
        async with http.get(f"/halfmoon/v1/requests?limit={len(BODIES)}") as response:
            retries = [row["num_retries"] for row in await response.json()]
    assert reasons.get("moved"), reasons
    assert not any(retries)
