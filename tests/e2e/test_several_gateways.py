"""Two gateways behind one address, and one of them killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from halfmoon.rpc.credentials.operator_token import kept_token
from tests.e2e.system import System, running_system

pytestmark = pytest.mark.e2e

NUM_STREAMS = 24
NUM_TOKENS = 1_200  # long enough to be there when a gateway dies
PATIENCE_S = 60
KEY = "one-for-all"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def ask(system: System, state_dir: Path, path: str) -> Any:
    """Over a connection of its own: whichever gateway gets it."""
    operator = {"Authorization": f"Bearer {kept_token(state_dir)}"}
    async with (
        aiohttp.ClientSession(headers={**operator, "Connection": "close"}) as session,
        session.get(system.url + path) as response,
    ):
        assert response.status == 200
        return await response.json()


async def stream(system: System, begun: Callable[[], None]) -> int | None:
    """Tokens of a whole answer; None for one that broke off."""
    body = {
        "model": "demo",
        "prompt": "Once",
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage = None
    try:
        async with (
            aiohttp.ClientSession(headers=HEADERS) as session,
            session.post(f"{system.url}/v1/completions", json=body) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                begun()
                if line.startswith(b"data: {"):
                    usage = json.loads(line[6:])["usage"]
    except aiohttp.ClientError:
        return None
    return None if usage is None else int(usage["completion_tokens"])


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.1)


def gateways(system: System) -> list[psutil.Process]:
    return system.serving("gateway")


async def test_a_killed_gateway_takes_only_its_own_streams_along(tmp_path: Path) -> None:
    options = ("--engine", "sim", "--sim-time-scale", "10", "--gateways", "2", "--api-key", KEY)
    async with running_system(tmp_path, *options) as system:
        seen: dict[str, Any] = {}

        async def both_see_the_workers() -> bool:
            view = await ask(system, tmp_path, "/halfmoon/v1/cluster")
            seen[view["gateway_id"]] = sorted(one["worker_id"] for one in view["workers"])
            return len(seen) == 2 and not view["missing"]

        await until(both_see_the_workers)
        first, second = seen.values()
        assert first == second
        assert len(first) == 2

        running = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(stream(system, one.set)) for one in running]
        await asyncio.wait_for(asyncio.gather(*(one.wait() for one in running)), PATIENCE_S)
        gateways(system)[0].kill()
        found = await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
        assert set(found) == {None, NUM_TOKENS}  # by chance all had come to one of the two: 1 in 8 million

        async def nothing_is_left() -> bool:
            loads = [one["load"] for one in (await ask(system, tmp_path, "/halfmoon/v1/cluster"))["workers"]]
            names = ("num_running", "num_waiting", "num_reserved", "num_held")
            return not any(load[name] for load in loads for name in names)

        await until(nothing_is_left)
        seen.clear()
        await until(both_see_the_workers)  # the killed one is back
        rows = {one["status"] for one in await ask(system, tmp_path, "/halfmoon/v1/requests")}
        assert rows == {"ok"}  # the killed one wrote nothing down
