"""Real prefill workers compute one long prompt together: transformers' tokens, whoever of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Reference
from tests.e2e.system import System, running_system
from tests.e2e.test_golden import MAX_TOKENS, completion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROMPT = "".join(f"{number} boats went out at dawn, and {number - 1} of them came home. " for number in range(1, 160))
OPTIONS = ("--dtype", "float32", "--quantization", "none", "--conditional-disaggregation", "off", "--prefill", "3")


@asynccontextmanager
async def sharing(tmp_path: Path) -> AsyncIterator[tuple[System, aiohttp.ClientSession]]:
    async with (
        running_system(tmp_path, *OPTIONS, "--max-prefill-degree", "3") as system,
        aiohttp.ClientSession(system.url) as http,
    ):
        yield system, http


async def until_idle(system: System, http: aiohttp.ClientSession) -> None:
    """Waits until the gateway knows three prefill workers that have nothing to compute."""
    num_idle = 0
    async with asyncio.timeout(120):
        while num_idle < 3:
            loads = [worker["load"] for worker in await system.cluster(http) if worker["role"] == "prefill"]
            num_idle = sum(not load["num_running"] + load["waiting_prefill_tokens"] for load in loads)
            await asyncio.sleep(0.05)


async def placement_of(http: aiohttp.ClientSession, number: int = 1) -> dict[str, Any]:
    """The latest decision, once there are so many."""
    async with asyncio.timeout(60):
        while True:
            async with http.get("/halfmoon/v1/placements") as response:
                found: list[dict[str, Any]] = await response.json()
            if len(found) >= number:
                return found[0]
            await asyncio.sleep(0.01)


def check(answer: dict[str, Any], reference: Reference) -> None:
    tokens = answer["choices"][0]["token_ids"]
    assert tokens == reference(PROMPT, MAX_TOKENS, tokens)
    assert answer["usage"]["prompt_tokens"] > 2048, "more than a step"


async def shared_answer(
    system: System, http: aiohttp.ClientSession, reference: Reference
) -> tuple[asyncio.Task[dict[str, Any]], dict[str, Any]]:
    """Sends the prompt, again if one worker got all of it: calibrated on a busy machine, one may look slow, or as if
    tokens took no time, until it has computed a prompt.
    """
    for number in range(1, 6):
        await until_idle(system, http)
        answer = asyncio.create_task(completion(http, PROMPT, cache_salt=str(number)))  # nothing of it is cached
        placement = await placement_of(http, number)
        if placement["helpers"]:
            return answer, placement
        check(await answer, reference)
    pytest.fail(f"nobody helped: {placement}")


async def test_all_of_them_give_the_tokens_of_one(tmp_path: Path, reference: Reference) -> None:
    async with sharing(tmp_path) as (system, http):
        answer, placement = await shared_answer(system, http, reference)
        assert placement["sharing"] == "shared"
        check(await answer, reference)
        placement = await placement_of(http)
        assert placement["measured"]["cached_tokens"] == 0
        assert placement["moves"] == []


@pytest.mark.parametrize("killed", ["helper", "serving"])
async def test_one_that_is_killed_in_the_middle_costs_no_token(
    tmp_path: Path, reference: Reference, killed: str
) -> None:
    async with sharing(tmp_path) as (system, http):
        answer, placement = await shared_answer(system, http, reference)
        name = placement["helpers"][0] if killed == "helper" else placement["prefill_worker"]
        (pid,) = (worker["pid"] for worker in await system.cluster(http) if worker["worker_id"] == name)
        os.kill(pid, signal.SIGKILL)
        check(await answer, reference)
        if killed == "helper":
            assert (await placement_of(http))["moves"] == []
