"""Answers whose gateway is killed: `openai`'s client and a stream get the rest, and one bill."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.e2e.system import System, running_system
from tests.e2e.test_several_gateways import gateways, until

pytestmark = pytest.mark.e2e

NUM_TOKENS = 1_200  # long enough to be there when a gateway dies
PATIENCE_S = 90
BODY: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once",
    "max_tokens": NUM_TOKENS,
    "min_tokens": NUM_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def get(system: System, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(system.url + path) as response:
        return await response.json()


async def rows_of(system: System, request_id: str) -> list[dict[str, Any]]:
    return [row for row in await get(system, "/halfmoon/v1/requests") if row["request_id"] == request_id]


async def num_computed(system: System) -> int:
    """Output tokens that the workers computed since their start."""
    workers = (await get(system, "/halfmoon/v1/cluster"))["workers"]
    return sum(int(worker["load"]["num_output_tokens_total"]) for worker in workers)


async def some_run(system: System) -> bool:
    workers = (await get(system, "/halfmoon/v1/cluster"))["workers"]
    return any(worker["role"] == "decode" and worker["load"]["num_running"] for worker in workers)


async def read_until_cut(system: System, headers: dict[str, str], num_events: int, cut: asyncio.Event) -> bytes:
    """The whole events of a stream that breaks off; sets `cut` after `num_events`."""
    came = b""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{system.url}/v1/completions", json=BODY, headers=headers) as response,
        ):
            async for data in response.content.iter_any():
                came += data
                if came.count(b"\n\n") >= num_events:
                    cut.set()
    except aiohttp.ClientError:
        pass
    return came[: came.rindex(b"\n\n") + 2]


async def read_whole(system: System, headers: dict[str, str]) -> bytes:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{system.url}/v1/completions", json=BODY, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.read()


def last_id(came: bytes) -> str:
    return [line for line in came.split(b"\n") if line.startswith(b"id: ")][-1][4:].decode()


async def test_a_killed_gateway_costs_a_pause(tmp_path: Path) -> None:
    async with running_system(tmp_path, "--engine", "sim", "--sim-time-scale", "10") as system:
        client = AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=5)
        asking = asyncio.create_task(
            client.completions.create(
                model="demo",
                prompt="Once",
                max_tokens=NUM_TOKENS,
                extra_body={"min_tokens": NUM_TOKENS},
                extra_headers={"Idempotency-Key": "whole"},
            )
        )
        await until(lambda: some_run(system))
        streamed = {"Idempotency-Key": "streamed"}
        begun = asyncio.Event()
        streaming = asyncio.create_task(read_until_cut(system, streamed, 50, begun))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        (gateway,) = gateways(system)
        gateway.kill()

        came = await asyncio.wait_for(streaming, PATIENCE_S)
        assert b"[DONE]" not in came
        resuming = {**streamed, "Last-Event-ID": last_id(came)}
        rest = await asyncio.wait_for(read_whole(system, resuming), PATIENCE_S)
        assert rest.endswith(b"data: [DONE]\n\n")
        usage = json.loads(rest.split(b"data: ")[-2])["usage"]
        assert usage["completion_tokens"] == NUM_TOKENS
        assert await read_whole(system, streamed) == came + rest

        answer = await asyncio.wait_for(asking, PATIENCE_S)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == NUM_TOKENS
        await client.close()

        async def both_are_recorded() -> bool:
            return all([await rows_of(system, request_id) for request_id in ("whole", "streamed")])

        await until(both_are_recorded)
        for request_id in ("whole", "streamed"):
            (row,) = await rows_of(system, request_id)
            assert (row["status"], row["output_tokens"]) == ("ok", NUM_TOKENS)
        assert await num_computed(system) <= 2 * NUM_TOKENS


async def test_of_two_gateways_the_other_one_goes_on_at_once(tmp_path: Path) -> None:
    options = ("--engine", "sim", "--sim-time-scale", "10", "--gateways", "2")
    async with running_system(tmp_path, *options) as system:
        keys = [{"Idempotency-Key": f"key-{number}"} for number in range(12)]
        begun = [asyncio.Event() for _ in keys]
        streams = [
            asyncio.create_task(read_until_cut(system, key, 20, event)) for key, event in zip(keys, begun, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), PATIENCE_S)
        gateways(system)[0].kill()
        parts = await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
        cut = [number for number, came in enumerate(parts) if b"[DONE]" not in came]
        assert cut
        for number in cut:
            resuming = {**keys[number], "Last-Event-ID": last_id(parts[number])}
            rest = await asyncio.wait_for(read_whole(system, resuming), PATIENCE_S)
            assert await read_whole(system, keys[number]) == parts[number] + rest
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await num_computed(system) <= len(keys) * NUM_TOKENS
