"""/v1/messages, as Anthropic's clients speak it: text, tools, streams, errors and counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.services.gateway import fakes
from tests.services.gateway.fakes import CONTEXT_TOKENS, MODEL, Script, running_fleet, served_model

HI = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": HI, "max_tokens": 100}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = 'So.<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'


async def post(fleet: fakes.Fleet, body: dict[str, Any], path: str = "", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(fleet.http, headers=headers) as session,
        session.post(f"/v1/messages{path}", json=body) as response,
    ):
        if response.content_type != "text/event-stream":
            return response.status, await response.json()
        blocks = [block.split("\n") for block in (await response.text()).split("\n\n") if block]
    events = [json.loads(lines[1].removeprefix("data: ")) for lines in blocks]
    assert [lines[0] for lines in blocks] == [f"event: {event['type']}" for event in events]
    return response.status, events


def prompt_of(worker: fakes.FakeWorker) -> str:
    return bytes(worker.calls.prefills[-1].generation.prompt_token_ids).decode()


@pytest.fixture
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), tool_format="hermes", context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    monkeypatch.setattr(fakes, "CONTEXT_TOKENS", 2_000)


async def test_a_text(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("hello", cached_tokens=3))
        system = [
            {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ]
        status, answer = await post(
            fleet, {**BODY, "system": system, "temperature": 0.5, "metadata": {"user_id": "me"}}
        )
        sampling = prefill.calls.prefills[0].generation.sampling
        assert prompt_of(prefill) == "system:be brief\nuser:hi\n"
    assert status == 200
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["content"] == [{"type": "text", "text": "hello"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": 21,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "output_tokens": 6,
    }
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 100)


@pytest.mark.parametrize(
    ("more", "text", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "he", "max_tokens", None),
        ({"stop_sequences": ["lo", "x"]}, "hel", "stop_sequence", "lo"),
    ],
)
async def test_why_a_message_ends(
    tmp_path: Path, more: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        _, answer = await post(fleet, BODY | more)
        _, events = await post(fleet, BODY | more | {"stream": True})
    assert answer["content"] == [{"type": "text", "text": text}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_the_events_of_a_text(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("héllo"))
        _, events = await post(fleet, BODY | {"stream": True})
    start, begin, *deltas, stop, last, end = events
    assert start["type"] == "message_start"
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert start["message"]["usage"]["input_tokens"] == 8
    assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(delta["type"], delta["index"], delta["delta"]["type"]) for delta in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(delta["delta"]["text"] for delta in deltas) == "héllo"
    assert stop == {"type": "content_block_stop", "index": 0}
    assert last["delta"]["stop_reason"] == "end_turn"
    assert last["usage"]["output_tokens"] == 7
    assert end == {"type": "message_stop"}


@pytest.mark.usefixtures("_tools")
async def test_tools_and_their_results(tmp_path: Path) -> None:
    body = BODY | {"tools": [WEATHER]}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(CALL))
        _, answer = await post(fleet, body)
        _, events = await post(fleet, body | {"stream": True})
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"}]}
        failed = {"type": "tool_result", "tool_use_id": "u", "content": "no net", "is_error": True}
        thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
        turns = [
            *HI,
            {"role": "assistant", "content": [thought, *answer["content"]]},
            {"role": "user", "content": [{"type": "text", "text": "now?"}, result, failed]},
        ]
        await post(fleet, body | {"messages": turns})
        prompt = prompt_of(prefill)
    text, call = answer["content"]
    assert (text, answer["stop_reason"]) == ({"type": "text", "text": "So."}, "tool_use")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rom"})
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [(0, "text"), (1, "tool_use")]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
    pieces = [
        event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"city": "Rom"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    tools, _, rest = prompt.partition("\n")
    described = {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"]}
    assert json.loads(tools.removeprefix("tools:")) == [{"type": "function", "function": described}]
    assert rest.startswith("user:hi\nassistant:So.")
    assert rest.endswith("tool/t:rain\ntool/u:Error: no net\nuser:now?\n")


@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_forced_call_is_a_grammar(tmp_path: Path, choice: dict[str, str]) -> None:
    said = '[{"name": "weather", "parameters": {"city": "Rom"}}]' if choice["type"] == "any" else '{"city": "Rom"}'
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(said))
        _, answer = await post(fleet, BODY | {"tools": [WEATHER], "tool_choice": choice})
        assert prefill.calls.prefills[0].generation.sampling.HasField("constraint")
    (call,) = answer["content"]
    assert (call["name"], call["input"], answer["stop_reason"]) == ("weather", {"city": "Rom"}, "tool_use")


async def test_a_begun_answer_is_continued_and_a_schema_is_kept(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        await post(fleet, BODY | {"messages": [*HI, {"role": "assistant", "content": "The answer is "}]})
        assert prompt_of(prefill) == "user:hi\nassistant:The answer is "
        config = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
        await post(fleet, BODY | {"output_config": config})
        assert prompt_of(prefill) == 'user:hi\nkwargs:{"reasoning_effort": "low"}\n'
        assert prefill.calls.prefills[-1].generation.sampling.constraint.source == '{"type": "object"}'
        await post(fleet, BODY | {"output_format": config["format"], "mcp_servers": [], "speed": "fast"})
        assert prefill.calls.prefills[-1].generation.sampling.constraint.source == '{"type": "object"}'


async def test_the_tokens_of_a_prompt_are_counted(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        body = {"model": MODEL, "messages": HI, "system": "be brief"}
        assert await post(fleet, body, "/count_tokens") == (200, {"input_tokens": len("system:be brief\nuser:hi\n")})


@pytest.mark.parametrize(
    ("more", "status", "kind", "said"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            400,
            "invalid_request_error",
            "missing parameter: messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]: input should be a valid dictionary",
        ),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT_TOKENS}]}, 400, "invalid_request_error", "context"),
        ({"thinking": {"type": "sometimes"}}, 400, "invalid_request_error", "thinking"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        ({"output_format": {}, "output_config": {"format": {}}}, 400, "invalid_request_error", "output_format"),
        ({"output_format": {"type": "yaml"}}, 400, "invalid_request_error", "output_config.format.type"),
        ({"mcp_servers": [{"url": "http://x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"top_q": 1}, 400, "invalid_request_error", "top_q"),
        ({"model": "other"}, 404, "not_found_error", "other"),
    ],
)
async def test_errors_have_anthropics_shape(
    tmp_path: Path, more: dict[str, Any], status: int, kind: str, said: str
) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        answer = await post(fleet, BODY | more)
    assert answer[0] == status, answer
    assert (answer[1]["type"], answer[1]["error"]["type"]) == ("error", kind)
    assert said in answer[1]["error"]["message"]


async def test_limits_that_the_equivalent_chat_has_are_no_internal_error(tmp_path: Path) -> None:
    calls = [{"type": "tool_use", "id": str(number), "name": "f", "input": {}} for number in range(129)]
    results = [{"type": "tool_result", "tool_use_id": str(number), "content": ""} for number in range(1_000)]
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        for turns in ([*HI, {"role": "assistant", "content": calls}], [{"role": "user", "content": results}] * 11):
            for path in ("", "/count_tokens"):
                body = {"messages": turns} | ({} if path else {"max_tokens": 5})
                status, answer = await post(fleet, body, path)
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.usefixtures("_tools")
async def test_arguments_that_are_no_json_and_a_text_that_ends_like_a_tag(tmp_path: Path) -> None:
    forced = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
    for number, said in enumerate(("[" * 90, '{"a": NaN}', "if a <")):
        async with running_fleet(tmp_path / str(number)) as fleet:
            await fleet.pair(Script(said))
            _, answer = await post(fleet, BODY | ({"tools": [WEATHER]} if said == "if a <" else forced))
        (block,) = answer["content"]
        assert block == {"type": "text", "text": said} if said == "if a <" else block["input"] == {}


async def test_keys_come_in_their_own_header_too(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_key=("secret",)) as fleet:
        await fleet.pair()
        assert (await post(fleet, BODY, **{"X-Api-Key": "secret"}))[0] == 200
        assert (await post(fleet, BODY, Authorization="Bearer secret"))[0] == 200
        status, answer = await post(fleet, BODY, **{"X-Api-Key": "wrong"})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")


async def test_without_workers_it_is_overloaded(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, return_wait_s=0) as fleet:
        status, answer = await post(fleet, BODY)
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")
