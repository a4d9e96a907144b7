"""What a user sees of the running system."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from tests.e2e.conftest import Reference
from tests.e2e.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def streamed(http: aiohttp.ClientSession, prompt: str, max_tokens: int) -> tuple[str, list[int]]:
    """The text, and its tokens."""
    greedy = {"temperature": 0, "return_token_ids": True}
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "stream": True, **greedy}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line.decode().strip() async for line in response.content]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "".join(choice["text"] for choice in choices), tokens


async def blocks_in_use(system: System, http: aiohttp.ClientSession) -> dict[str, int]:
    """By role; only blocks that requests hold count."""
    return {w["role"]: w["total_blocks"] - w["load"]["free_blocks"] for w in await system.cluster(http)}


async def requests_held(system: System, http: aiohttp.ClientSession) -> int:
    states = ("num_running", "num_waiting", "num_reserved", "num_held")
    return sum(worker["load"][state] for worker in await system.cluster(http) for state in states)


async def test_it_is_ready_and_says_how_to_use_it(system: System, http: aiohttp.ClientSession) -> None:
    assert any(f"curl -N {system.url}/v1/chat/completions" in line for line in system.printed)
    async with http.get("/health") as response:
        assert response.status == 200
    roles = sorted(worker["role"] for worker in await system.cluster(http))
    assert roles == ["decode", "prefill"]


async def test_twenty_streams_at_once_each_with_its_own_text(
    http: aiohttp.ClientSession, reference: Reference, checkpoint: Checkpoint
) -> None:
    prompts = [f"Line {index}: the moon is {index + 3} days old and" for index in range(20)]
    answers = await asyncio.gather(*(streamed(http, prompt, 12) for prompt in prompts))
    tokenizer = Tokenizer(checkpoint)
    for prompt, (text, tokens) in zip(prompts, answers, strict=True):
        assert text
        assert tokens == reference(prompt, 12, tokens)
        assert text == tokenizer.decode(tokens)


async def test_the_openai_client_chats_streaming_and_not(system: System) -> None:
    question: list[Any] = [{"role": "user", "content": "Name the largest planet."}]
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="demo", messages=question, temperature=0, max_tokens=20)
        parts = await client.chat.completions.create(
            model="demo",
            messages=question,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in parts]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert text == whole.choices[0].message.content
    usages = [one.usage.model_dump() for one in (whole, chunks[-1]) if one.usage is not None]
    first_known, known = (usage.pop("prompt_tokens_details")["cached_tokens"] for usage in usages)
    assert first_known <= known < usages[0]["prompt_tokens"]  # it is the same prompt again
    assert usages[0] == usages[1]
    assert usages[0]["completion_tokens"] <= 20


async def test_a_seed_makes_sampling_repeatable(http: aiohttp.ClientSession) -> None:
    async def sampled(seed: int) -> str:
        body = {"model": "demo", "prompt": "A poem:", "max_tokens": 16, "temperature": 1.0, "seed": seed}
        async with http.post("/v1/completions", json=body) as response:
            return str((await response.json())["choices"][0]["text"])

    first, second, other = await asyncio.gather(sampled(7), sampled(7), sampled(8))
    assert first == second
    assert first != other


async def test_a_client_that_goes_away_frees_its_blocks_on_both_workers(
    system: System, http: aiohttp.ClientSession
) -> None:
    body = {"model": "demo", "prompt": "word " * 900, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with http.post("/v1/completions", json=body) as response:
        await response.content.readline()  # decoding has begun
        async with asyncio.timeout(30):
            while not await requests_held(system, http):
                await asyncio.sleep(0.2)
        response.close()
    async with asyncio.timeout(30):
        while await requests_held(system, http) or any((await blocks_in_use(system, http)).values()):
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nope", "prompt": "x"}, 404, "model"),
        ({"model": "demo", "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"model": "demo", "prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"model": "demo", "prompt": "x", "n": 0}, 400, "n"),
    ],
)
async def test_bad_input_names_the_parameter(
    http: aiohttp.ClientSession, body: dict[str, Any], status: int, param: str
) -> None:
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == param


async def test_malformed_json_is_an_openai_error(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/chat/completions", data=b"{", headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
