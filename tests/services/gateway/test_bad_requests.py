"""Everything a client can get wrong, in the OpenAI API's shape and naming the parameter."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import openai
import pytest
from aiohttp import web

from services.gateway.http.received_request import receive_body
from tests.services.gateway.fakes import CONTEXT_TOKENS, MODEL, PATIENCE_S, Fleet, Script, running_fleet

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, max_body_bytes=50_000) as fleet:
        await fleet.pair()
        yield fleet


async def refused(fleet: Fleet, path: str, body: Any, method: str = "POST") -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.request(method, fleet.http + path, data=data) as response:
        answer = await response.json()
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]
        return response.status, answer["error"]


async def test_every_wrong_chat_parameter_is_named(fleet: Fleet) -> None:
    wrong: list[tuple[str, Any]] = [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", "5"),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_completion_tokens", -1),
        ("n", 129),
        ("chat_template_kwargs", {"tools": []}),
        ("n", True),
        ("n", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", 5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"257": 1}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [1]),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("min_tokens", -1),
        ("min_tokens", CONTEXT_TOKENS),
        ("stop_token_ids", [257]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", {str(one): 1 for one in range(1025)}),
        ("ignore_eos", "yes"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("user", 5),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "xml"}),
        ("modalities", ["audio"]),
        ("audio", {}),
        ("best_of", 2),
        ("echo", True),
        ("bad_words", "x"),
        ("priority", 2**31),
        ("chat_template", "{{ messages }}"),
        ("stream_options", {"continuous_usage_stats": True}),
        ("no_such_parameter", 1),
        ("prompt", "hi"),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("model", 5),
    ]
    for param, value in wrong:
        status, error = await refused(fleet, CHAT, {"model": MODEL, "messages": MESSAGES, param: value})
        assert (status, error["type"]) == (400, "invalid_request_error"), (param, value)
        assert str(error["param"]).split("[")[0].split(".")[0] == param, (param, value, error)
        assert param in error["message"] or param == "stop", (param, value, error)


@pytest.mark.parametrize("given", [5, False, ["a"]])
async def test_a_schema_of_the_wrong_type_is_named_as_the_client_wrote_it(fleet: Fleet, given: Any) -> None:
    _, error = await refused(fleet, CHAT, {"model": MODEL, "messages": MESSAGES, "structured_outputs": {"json": given}})
    assert error["param"] == "structured_outputs.json"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": MESSAGES, "response_format": 5}, "response_format: input should be a valid dictionary"),
        (
            "/v1/responses",
            {"input": [{"type": "x"}]},
            "input[0]: the type should be one of 'message', 'function_call', 'function_call_output', 'reasoning'",
        ),
        ("/v1/responses", {"input": [5]}, "input[0]: input should be a valid dictionary"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "missing parameter: input[0].content[0].text",
        ),
    ],
)
async def test_reasons_do_not_name_classes_and_functions(
    fleet: Fleet, path: str, body: dict[str, Any], message: str
) -> None:
    _, error = await refused(fleet, path, {"model": MODEL, **body})
    assert error["message"] == message


async def test_wrong_messages_are_named_by_place(fleet: Fleet) -> None:
    wrong: list[tuple[Any, str]] = [
        ({"role": "a boss", "content": "hi"}, "messages[1].role"),
        ({"content": "hi"}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
        ),
        ({"role": "user", "content": "hi", "mood": "good"}, "messages[1].mood"),
        ({"role": "user", "content": "hi", "name": 5}, "messages[1].name"),
        ({"role": "user", "content": "hi", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "hi", "tool_call_id": "t"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        ("hi", "messages[1]"),
    ]
    for message, param in wrong:
        status, error = await refused(fleet, CHAT, {"model": MODEL, "messages": [*MESSAGES, message]})
        assert (status, error["param"]) == (400, param), (message, error)


@pytest.mark.parametrize("name", ["max-tokens", "a.b", "int", "str", "list[str]", "none", "", "ü"])
async def test_unknown_parameters_are_named_as_they_are(fleet: Fleet, name: str) -> None:
    """Also those that read like pydantic's own words."""
    _, error = await refused(fleet, CHAT, {"model": MODEL, "messages": MESSAGES, name: 1})
    assert (error["param"], error["message"]) == (name, f"unknown parameter: {name or repr(name)}")
    _, error = await refused(fleet, CHAT, {"model": MODEL, "messages": [{**MESSAGES[0], name: 1}]})
    assert error["param"] == f"messages[0].{name}"
    _, error = await refused(fleet, CHAT, {"model": MODEL, "messages": MESSAGES, "stop": {name: 1}})
    assert error["param"] == "stop"


async def test_of_many_unknown_parameters_one_is_named(fleet: Fleet) -> None:
    many = {f"x{number}": 1 for number in range(1000)}
    _, error = await refused(fleet, CHAT, {"model": MODEL, "messages": MESSAGES, **many})
    assert error["message"] == "unknown parameter: x0"
    _, error = await refused(fleet, CHAT, {"model": MODEL, "messages": [MESSAGES[0] | many]})
    assert error["message"] == "unknown parameter: messages[0].x0"


async def test_neutral_values_and_nulls_change_nothing(fleet: Fleet) -> None:
    names = ("temperature", "top_p", "stop", "max_tokens", "logit_bias", "seed", "tools", "response_format", "logprobs")
    neutral: dict[str, Any] = {
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {"a": "b"},
        "user": "me",
        "parallel_tool_calls": True,
        "top_k": -1,
        "stop": [],
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "messages": [{**MESSAGES[0], "name": None, "tool_call_id": None}],
    }
    for extra in (dict.fromkeys(names), neutral):
        body = json.dumps({"model": MODEL, "messages": MESSAGES, **extra})
        async with aiohttp.ClientSession() as session, session.post(fleet.http + CHAT, data=body) as response:
            assert response.status == 200, await response.text()


async def test_what_changes_no_answer_is_ignored_and_named(fleet: Fleet) -> None:
    said: dict[str, Any] = {
        "service_tier": "flex",
        "store": True,
        "verbosity": "low",
        "request_id": "mine",
        "kv_transfer_params": {"do_remote_decode": True},
        "stream": True,
        "stream_options": {"include_obfuscation": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "ho", "refusal": None, "parsed": None, "cache_control": {}},
        ],
        "an_unknown_name": None,
    }
    async with aiohttp.ClientSession(fleet.http) as session, session.post(CHAT, json=said) as response:
        assert response.status == 200, await response.text()
        warning = response.headers["Warning"]
    assert warning == '299 halfmoon "ignored: service_tier, store, verbosity, request_id, kv_transfer_params"'
    async with aiohttp.ClientSession(fleet.http) as session:
        async with session.post(CHAT, json={"messages": MESSAGES, "store": None}) as response:
            assert (response.status, "Warning" in response.headers) == (200, False)
        async with session.post(CHAT, json={"messages": MESSAGES, "temperature": 100.0}) as response:
            assert response.status == 200


async def test_the_former_names_of_structured_outputs(fleet: Fleet) -> None:
    body = {"model": MODEL, "messages": MESSAGES}
    _, error = await refused(fleet, CHAT, body | {"guided_json": {"type": "nonsense"}})
    assert error["param"] == "structured_outputs"
    _, error = await refused(fleet, CHAT, body | {"guided_regex": "a", "structured_outputs": {"regex": "b"}})
    assert error["param"] == "guided_regex"
    said = body | {"guided_choice": ["hello"], "guided_json": None}
    async with aiohttp.ClientSession(fleet.http) as session, session.post(CHAT, json=said) as response:
        assert response.status == 200, await response.text()


async def test_an_output_that_does_not_fit_is_cut(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("y" * 2 * CONTEXT_TOKENS))
        body = {"model": MODEL, "prompt": ["x" * 150, "x" * 190], "max_tokens": 100_000, "min_tokens": 60, "n": 2}
        async with aiohttp.ClientSession(fleet.http) as session, session.post(COMPLETIONS, json=body) as response:
            choices = (await response.json())["choices"]
        assert [len(choice["text"]) for choice in choices] == [CONTEXT_TOKENS - 150] * 2 + [CONTEXT_TOKENS - 190] * 2
        assert {choice["finish_reason"] for choice in choices} == {"length"}


async def test_wrong_prompts(fleet: Fleet) -> None:
    wrong: tuple[Any, ...] = ("", [], [""], ["a", ""], [[1], []], [257], [-1], ["a", 5], [True], {}, 5, None, [[]])
    for prompt in wrong:
        status, error = await refused(fleet, COMPLETIONS, {"model": MODEL, "prompt": prompt})
        assert (status, str(error["param"]).split("[")[0]) == (400, "prompt"), (prompt, error)
    alone: list[tuple[str, Any]] = [
        *(("logprobs", 21), ("logprobs", True), ("suffix", "x"), ("best_of", 0), ("best_of", 129), ("max_tokens", 0)),
        *(("use_beam_search", True), ("messages", MESSAGES)),
    ]
    pairs: list[tuple[str, dict[str, Any]]] = [
        ("best_of", {"best_of": 2, "n": 3}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("n", {"n": 128, "prompt": ["a"] * 9}),
    ]
    for param, fields in [*((param, {param: value}) for param, value in alone), *pairs]:
        status, error = await refused(fleet, COMPLETIONS, {"model": MODEL, "prompt": "a", **fields})
        assert (status, error["param"]) == (400, param), fields
        assert param in error["message"]
    status, error = await refused(fleet, COMPLETIONS, {"model": MODEL})
    assert (status, error["param"], error["message"]) == (400, "prompt", "missing parameter: prompt")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"5", b"\xff", b'{"model": NaN}', b"[" * 5000, b'{"a": "\\ud800"}']
)
async def test_bodies_that_are_no_json_object(fleet: Fleet, body: bytes) -> None:
    status, error = await refused(fleet, CHAT, body)
    assert (status, error["type"]) == (400, "invalid_request_error")


async def test_addresses_methods_and_sizes(fleet: Fleet) -> None:
    assert (await refused(fleet, "/v2/none", b""))[0] == 404
    assert (await refused(fleet, CHAT, b"", method="GET"))[0] == 405
    assert (await refused(fleet, "/health", b"", method="DELETE"))[0] == 405
    status, error = await refused(
        fleet, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 60_000}]}
    )
    assert (status, error["code"]) == (413, "body_too_large")


async def encoded(fleet: Fleet, data: bytes, encoding: str) -> tuple[int, dict[str, Any]]:
    session = aiohttp.ClientSession()
    headers = {"Content-Encoding": encoding}
    async with session, session.post(fleet.http + CHAT, data=data, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        return response.status, answer


GOOD = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
LONG = json.dumps({"model": MODEL, "messages": MESSAGES, "user": "x" * 60_000}).encode()


async def test_compressed_bodies(fleet: Fleet) -> None:
    bare = zlib.compressobj(wbits=-15)
    for encoding, data in (
        ("gzip", gzip.compress(GOOD)),
        ("GZIP", gzip.compress(GOOD)),
        ("deflate", zlib.compress(GOOD)),
        ("deflate", bare.compress(GOOD) + bare.flush()),
        ("identity", GOOD),
    ):
        status, answer = await encoded(fleet, data, encoding)
        assert (status, answer.get("error")) == (200, None)


async def test_bodies_that_are_not_encoded_as_they_say(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    broken = (b"no gzip", b"", gzip.compress(GOOD)[:-1], gzip.compress(GOOD) + b"x", zlib.compress(GOOD)[:9])
    for encoding in ("gzip", "deflate"):
        for data in broken:
            status, answer = await encoded(fleet, data, encoding)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert encoding in answer["error"]["message"]
    for encoding in ("br", "zstd", "gzip, br", "x" * 5000):
        status, answer = await encoded(fleet, GOOD, encoding)
        assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")
        assert encoding[:200] in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 400
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    request = SimpleNamespace(headers={}, read=asyncio.Event().wait)
    with pytest.raises(web.HTTPRequestTimeout) as caught:
        await receive_body(cast("web.Request", request), within_s=0)
    assert caught.value.text == "the body was not whole within 0 s"


@pytest.mark.parametrize("begun", [True, False], ids=["while it is read", "before it is read"])
async def test_a_chunk_that_is_none_is_answered_at_once(
    fleet: Fleet, begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    address = fleet.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(address[0], int(address[1]))
    expect = "Expect: 100-continue\r\n" if begun else ""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{expect}\r\n"
    writer.write(head.encode())
    if begun:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(b"no number\r\n{}\r\n")
    async with asyncio.timeout(PATIENCE_S):
        answer = (await reader.read()).decode()  # to the end of the connection
    writer.close()
    assert answer.startswith(("HTTP/1.1 400", "HTTP/1.0 400"))  # 1.0 where no request was read
    assert answer.count("HTTP/1.") == 1
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_limit_of_a_body_counts_what_is_unpacked(fleet: Fleet) -> None:
    for encoding, data in (("identity", LONG), ("gzip", gzip.compress(LONG)), ("deflate", zlib.compress(LONG))):
        status, answer = await encoded(fleet, data, encoding)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "50000 bytes" in answer["error"]["message"]


async def test_long_names_are_not_repeated(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    status, error = await refused(fleet, CHAT, {"model": "x" * 40_000, "messages": MESSAGES})
    assert status == 404
    assert "x" * 200 + "…" in error["message"]
    assert len(error["message"]) < 400
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}/v1/models/{'x' * 5000}") as response:
        assert len(await response.text()) < 500
    (ended,) = [record for record in caplog.records if record.message == "request.ended"]
    assert ended.error == error["message"]  # type: ignore[attr-defined]


async def test_an_unknown_model(fleet: Fleet) -> None:
    status, error = await refused(fleet, CHAT, {"model": "gpt-x", "messages": MESSAGES})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await fleet.client.models.retrieve("some/other")
    assert (await fleet.client.models.retrieve(MODEL)).id == MODEL
    assert [model.id async for model in fleet.client.models.list()] == [MODEL]


async def test_the_context_length_with_its_figures(fleet: Fleet) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    status, error = await refused(fleet, CHAT, {"model": MODEL, "messages": long})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "200" in error["message"]
    assert "306" in error["message"]
    status, error = await refused(fleet, COMPLETIONS, {"model": MODEL, "prompt": "x" * 200})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    whole = await fleet.client.completions.create(model=MODEL, prompt="x" * 199)
    assert whole.choices[0].text == "h"  # sixteen by default, but only one fits


async def test_the_client_raises_its_own_error(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await fleet.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], temperature=-3
        )
    assert caught.value.param == "temperature"
