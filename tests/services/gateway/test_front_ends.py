"""What chat front ends send: Open WebUI with its parameters and tasks, LibreChat through LangChain."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, Script, running_fleet, served_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "auto"}}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_web",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "count": {"type": "integer", "default": 5}},
            "required": ["query"],
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search_web", "arguments": '{"query": "x"}'}}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PARAMETERS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.05,
    "top_k": 40,
    "max_tokens": 3,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "reasoning_effort": "low",
    "seed": 42,
    "keep_alive": "5m",
    "num_ctx": 4096,
    "num_thread": 4,
    "use_mmap": True,
    "stop": ["\n\n", "User:"],
    "logit_bias": {"100": -100},
}
TITLE = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
BODIES: dict[str, dict[str, Any]] = {
    "Open WebUI: chat": {"messages": [{"role": "system", "content": "s"}, USER], **STREAM},
    "Open WebUI: parameters": {"messages": [USER], **STREAM, **PARAMETERS},
    "Open WebUI: title": {"messages": [USER], "stream": False, "max_completion_tokens": 1000},
    "Open WebUI: tags of an older release": {"messages": [USER], "stream": False, "max_tokens": 50, "metadata": {}},
    "Open WebUI: tools": {"messages": [USER], "tools": [SEARCH], **STREAM},
    "Open WebUI: results": {
        "messages": [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "found"}],
        "tools": [SEARCH],
        **STREAM,
    },
    "Open WebUI: reasoning sent back": {
        "messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "so"}, USER],
        **STREAM,
    },
    "LibreChat: chat": {
        "messages": [{"role": "system", "content": "s"}, PARTS],
        "user": "0123456789abcdef01234567",
        "n": 1,
        "temperature": 1,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        **STREAM,
    },
    "LibreChat: title by a function": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "output", "description": "", "parameters": TITLE}}],
        "tool_choice": {"type": "function", "function": {"name": "output"}},
        "parallel_tool_calls": False,
        "stream": False,
    },
    "LibreChat: title by a schema": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "out", "schema": TITLE, "strict": True}},
        "stream": False,
    },
    "LibreChat: agent": {
        "messages": [
            PARTS,
            {"role": "assistant", "content": [{"type": "text", "text": "let me look"}], "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "name": "search_web",
                "content": [{"type": "text", "text": "x"}],
            },
        ],
        "tools": [{**SEARCH, "function": {**SEARCH["function"], "strict": False}}],
        "tool_choice": "auto",
        "reasoning_effort": "medium",
        "verbosity": "low",
        "prompt_cache_key": "c",
        "include_reasoning": True,
        **STREAM,
    },
    "Jan and llama.cpp's page": {
        "messages": [{"role": "user", "content": "hi"}],
        **STREAM,
        "cache_prompt": True,
        "return_progress": True,
        "timings_per_token": True,
        "id_slot": -1,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "dry_multiplier": 0,
        "xtc_probability": 0,
        "typical_p": 1,
        "mirostat": 0,
    },
    "LM Studio's fields": {
        "messages": [{"role": "user", "content": "hi"}],
        **STREAM,
        "ttl": 300,
        "draft_model": "small",
    },
    "Mistral's fields": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho", "prefix": False},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "The", "prefix": True},
        ],
        **STREAM,
        "random_seed": 5,
        "safe_prompt": False,
    },
    "the message of openai's `parse`": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}},
            {"role": "user", "content": "hi"},
        ],
        **STREAM,
    },
    "OpenRouter's fields": {
        "messages": [{"role": "user", "content": "hi"}],
        **STREAM,
        "provider": {"order": ["x"]},
        "route": "fallback",
        "usage": {"include": True},
    },
}
HEADERS = {
    "Authorization": "Bearer none",
    "HTTP-Referer": "https://openwebui.com/",
    "X-Title": "Open WebUI",
    "X-OpenWebUI-User-Name": "J%C3%BCrgen",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-Chat-Id": "2",
    "X-Stainless-Lang": "js",
    "Cookie": "token=x; a=b",
}


@pytest.fixture(autouse=True)
def _room_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    monkeypatch.setattr(fakes, "CONTEXT_TOKENS", 2_000)


@pytest.mark.parametrize("name", BODIES)
async def test_it_is_answered(tmp_path: Path, name: str) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http, headers=HEADERS) as session:
        await fleet.pair(Script("ok"))
        async with session.post(CHAT, json={"model": MODEL, **BODIES[name]}) as response:
            text = await response.text()
            assert response.status == 200, text
            assert ("data: [DONE]" in text) == bool(BODIES[name]["stream"])
            assert '"usage"' in text


async def test_what_mistral_calls_otherwise(tmp_path: Path) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The", "prefix": True}]
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        prefill, _ = await fleet.pair(Script("ok"))
        async with session.post(CHAT, json={"messages": begun, "random_seed": 5}) as response:
            assert response.status == 200, await response.text()
        async with session.post(CHAT, json={"messages": begun, "random_seed": 5, "seed": 6}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "random_seed")
        generation = prefill.calls.prefills[0].generation
    assert bytes(generation.prompt_token_ids).decode() == "user:hi\nassistant:The"
    assert generation.sampling.seed == 5


@pytest.mark.parametrize(("sampler", "value"), [("typical_p", 0.9), ("mirostat", 2), ("dry_multiplier", 0.8)])
async def test_a_sampler_of_other_servers_is_refused_unless_it_is_off(
    tmp_path: Path, sampler: str, value: float
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], sampler: value}
    async with (
        running_fleet(tmp_path) as fleet,
        aiohttp.ClientSession(fleet.http, headers=HEADERS) as session,
        session.post(CHAT, json=body) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, sampler)
    assert "temperature" in error["message"]


async def test_a_picture_is_refused_by_name(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, PICTURE]}]
    async with (
        running_fleet(tmp_path) as fleet,
        aiohttp.ClientSession(fleet.http, headers=HEADERS) as session,
        session.post(CHAT, json={"model": MODEL, "messages": messages, **STREAM}) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "messages[0].content[1].type")
