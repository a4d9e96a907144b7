"""/v1/responses as far as text goes, through the official client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.errors import HalfmoonError
from halfmoon.pb.prefill_pb2 import PrefillEvent, PrefillRequest
from halfmoon.pb.types_pb2 import Constraint
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, FakeWorker, Script, running_fleet, served_model, soon


async def test_a_text(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("hello", cached_tokens=3))
        answer = await fleet.client.responses.create(
            model=MODEL, input="hi", instructions="be brief", metadata={"a": "b"}, temperature=0.5, user="me"
        )
        request = prefill.calls.prefills[0].generation
    assert answer.output_text == "hello"
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert answer.id.startswith("resp_")
    assert answer.output[0].type == "message"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (24, 6)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert bytes(request.prompt_token_ids) == b"system:be brief\nuser:hi\n"
    assert request.sampling.temperature == 0.5


async def test_an_output_can_be_sent_back(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("hello"))
        first = await fleet.client.responses.create(model=MODEL, input="hi")
        turns: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"role": "user", "content": "more"},
        ]
        await fleet.client.responses.create(model=MODEL, input=turns, store=False)
        prompt = bytes(prefill.calls.prefills[-1].generation.prompt_token_ids)
    assert prompt == b"user:hi\nassistant:hello\nuser:more\n"


@pytest.mark.parametrize(("max_tokens", "text", "last"), [(None, "héllo", "completed"), (2, "h\ufffd", "incomplete")])
async def test_the_events_of_a_stream(tmp_path: Path, max_tokens: int | None, text: str, last: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("héllo"))
        options: dict[str, Any] = {} if max_tokens is None else {"max_output_tokens": max_tokens}
        stream = await fleet.client.responses.create(model=MODEL, input="hi", stream=True, **options)
        events: list[Any] = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == opening
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", last]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == text
    assert events[-4].text == events[-1].response.output_text == text
    assert events[-1].response.status == last
    assert events[-1].response.usage.output_tokens == (max_tokens or 7)


async def test_the_stream_on_the_wire(tmp_path: Path) -> None:
    body = {"model": MODEL, "input": "hi", "stream": True}
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        await fleet.pair(Script("a"))
        async with session.post("/v1/responses", json=body) as response:
            events = (await response.text()).split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


async def test_a_stream_that_fails_ends_with_an_error_event(tmp_path: Path) -> None:
    async def failing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        async for event in worker.usual_prefill(request):
            yield event
            raise HalfmoonError("broken")

    body = {"model": MODEL, "input": "hi", "stream": True}
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        worker = await fleet.add("b0", "both", Script("hello"))
        worker.on_prefill = failing
        async with session.post("/v1/responses", json=body) as response:
            last = (await soon(response.text())).strip().split("\n")[-1]
    event = json.loads(last.removeprefix("data: "))
    assert (event["type"], event["code"], event["message"]) == ("error", "internal_error", "broken")


async def test_structured_text_and_logprobs(tmp_path: Path) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("{}"))
        answer = await fleet.client.responses.create(
            model=MODEL,
            input="hi",
            text=form,
            include=["message.output_text.logprobs"],
            top_logprobs=1,
        )
        sampling = prefill.calls.prefills[0].generation.sampling
    closed = {**schema, "additionalProperties": False}
    assert (sampling.constraint.kind, json.loads(sampling.constraint.source)) == (Constraint.JSON_SCHEMA, closed)
    message: Any = answer.output[0]
    part = message.content[0]
    assert [entry.token for entry in part.logprobs] == ["{", "}"]
    assert [top.token for top in part.logprobs[0].top_logprobs] == ["A"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input[0]"),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "background": True}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_contents"]}, "include[0]"),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 1}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], param: str) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        await fleet.pair()
        async with session.post("/v1/responses", json={"model": MODEL, "input": "hi", **extra}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param), error
            assert param in error["message"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("responses", {"input": "hi"}), ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})],
)
async def test_no_likeliest_tokens_need_no_log_probabilities(tmp_path: Path, path: str, prompt: dict[str, Any]) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        prefill, _ = await fleet.pair()
        async with session.post(f"/v1/{path}", json={"model": MODEL, "top_logprobs": 0, **prompt}) as response:
            assert response.status == 200, await response.text()
        assert not prefill.calls.prefills[0].generation.sampling.HasField("num_top_logprobs")


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'


@pytest.fixture
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), tool_format="hermes", context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    monkeypatch.setattr(fakes, "CONTEXT_TOKENS", 2_000)


@pytest.mark.usefixtures("_tools")
async def test_calls_are_items_and_come_back_with_their_results(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(f"So.{CALL}"))
        asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER]}
        first = await fleet.client.responses.create(input="hi", **asked)
        async with fleet.client.responses.stream(input="hi", **asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        text, call = first.output
        assert call.type == "function_call"
        back: list[Any] = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        await fleet.client.responses.create(input=back, **asked)
        prompt = bytes(prefill.calls.prefills[-1].generation.prompt_token_ids).decode()
    assert (text.type, first.output_text, first.status, first.tool_choice) == ("message", "So.", "completed", "auto")
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Rom"}, "completed")
    assert [item.type for item in streamed.output] == ["message", "function_call"]
    assert len({item["id"] for item in streamed.model_dump()["output"]}) == 2
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    tools, _, rest = prompt.partition("\n")
    function = {name: WEATHER[name] for name in ("name", "description", "parameters")}
    assert json.loads(tools.removeprefix("tools:")) == [{"type": "function", "function": function}]
    assert rest.startswith("user:hi\nassistant:So.[")
    assert rest.endswith(f"tool/{call.call_id}:rain\n")


@pytest.mark.usefixtures("_tools")
async def test_a_named_function_is_forced_and_its_arguments_stream(tmp_path: Path) -> None:
    named: Any = {"type": "function", "name": "weather"}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script('{"city": "Rom"}'))
        stream = await fleet.client.responses.create(
            model=MODEL, input="hi", tools=[WEATHER], tool_choice=named, stream=True
        )
        events: list[Any] = [event async for event in stream]
        assert prefill.calls.prefills[0].generation.sampling.HasField("constraint")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert json.loads("".join(deltas)) == {"city": "Rom"}
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Rom"}')
    assert events[-1].response.tool_choice.name == "weather"


@pytest.mark.usefixtures("_tools")
async def test_tools_that_a_server_would_run_are_left_out_beside_functions(tmp_path: Path) -> None:
    """As Codex sends them. Where there is no function, the request wanted nothing else, and is refused."""
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    search = {"type": "web_search", "external_web_access": False}
    agents = {"type": "namespace", "name": "agents", "tools": [function]}
    turn = {"type": "message", "role": "assistant", "phase": "final", "content": [{"type": "output_text", "text": "a"}]}
    body = {"input": [turn, {"role": "user", "content": "hi"}], "client_metadata": {"thread_id": "1"}, "store": False}
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        prefill, _ = await fleet.pair(Script("hello"))
        async with session.post("/v1/responses", json={**body, "tools": [search, function, agents]}) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert response.headers["Warning"] == '299 halfmoon "ignored: tools[0], tools[2], client_metadata"'
        async with session.post("/v1/responses", json={**body, "tools": [search]}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "tools[0].type"), error
        prompt = bytes(prefill.calls.prefills[0].generation.prompt_token_ids).decode()
    assert [tool["type"] for tool in answer["tools"]] == ["function"]
    assert "web_search" not in prompt
