"""What clients build on over real engines: some of the tools, and conversations that find their KV again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.e2e.system import System
from tests.e2e.test_api import ASK, asked

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

STORY = "Tell a long story of a keeper of a lighthouse, of a storm, and of a ship that came too late. " * 12


def tool(name: str) -> dict[str, Any]:
    number = {"type": "object", "properties": {name: {"enum": [1, 2]}}, "required": [name]}
    return {"name": name, "description": f"Takes the number {name}", "parameters": number}


TOOLS = [tool(name) for name in ("first", "second", "third")]
NAMED = [{"type": "function", "function": {"name": name}} for name in ("second", "third")]


async def test_only_allowed_tools_are_called(http: aiohttp.ClientSession) -> None:
    chat_tools = [{"type": "function", "function": one} for one in TOOLS]
    required = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": NAMED}}
    body = {"messages": ASK, "tools": chat_tools, "tool_choice": required, "temperature": 1.0, "n": 4, "seed": 3}
    chat = await asked(http, "/v1/chat/completions", **body, max_tokens=200)
    calls = [call["function"] for choice in chat["choices"] for call in choice["message"].get("tool_calls") or ()]
    assert calls
    for call in calls:
        assert call["name"] in ("second", "third")
        assert json.loads(call["arguments"]) in ({call["name"]: 1}, {call["name"]: 2})
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "third"}]}
    flat = [{"type": "function", **one} for one in TOOLS]
    response = await asked(http, "/v1/responses", input="Go.", tools=flat, tool_choice=choice, max_output_tokens=200)
    assert {item["name"] for item in response["output"] if item["type"] == "function_call"} == {"third"}


async def test_the_model_is_told_of_allowed_tools_alone(http: aiohttp.ClientSession) -> None:
    chat_tools = [{"type": "function", "function": one} for one in TOOLS]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": NAMED}}
    body = {"messages": ASK, "max_tokens": 1, "return_token_ids": True}
    some = await asked(http, "/v1/chat/completions", **body, tools=chat_tools, tool_choice=allowed)
    those = await asked(http, "/v1/chat/completions", **body, tools=chat_tools[1:])
    assert some["prompt_token_ids"] == those["prompt_token_ids"]


async def test_the_next_turn_finds_the_answer_of_the_one_before(system: System, http: aiohttp.ClientSession) -> None:
    async def prefill_worker() -> dict[str, Any]:
        return next(worker for worker in await system.cluster(http) if worker["role"] == "prefill")

    async def settled() -> dict[str, Any]:
        """Once the blocks of earlier requests are reported, too: reports come every second."""
        worker = await prefill_worker()
        while True:
            await asyncio.sleep(3)
            earlier, worker = worker, await prefill_worker()
            if worker["cached_blocks"] == earlier["cached_blocks"]:
                return worker

    before = await settled()
    first = await asked(http, "/v1/responses", input=STORY, max_output_tokens=200, temperature=0)
    usage = first["usage"]
    num_blocks = (usage["total_tokens"] - 1) // before["layout"]["block_tokens"]
    assert num_blocks > usage["input_tokens"] // before["layout"]["block_tokens"]
    async with asyncio.timeout(60):
        while (await prefill_worker())["cached_blocks"] < before["cached_blocks"] + num_blocks:
            await asyncio.sleep(0.1)
    later = {"previous_response_id": first["id"], "input": "And then?", "max_output_tokens": 1}
    second = await asked(http, "/v1/responses", **later)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > usage["input_tokens"]
