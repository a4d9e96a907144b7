"""Keys, origins, limits of headers, and the tokenizer's endpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.service import read_settings
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fakes import CONTEXT_TOKENS, EOS, MODEL, Fleet, running_fleet

HI: list[Any] = [{"role": "user", "content": "hi"}]
PAGE = "https://page.example"


async def ask(fleet: Fleet, method: str, path: str, **options: Any) -> tuple[int, Any, Any]:
    async with aiohttp.ClientSession() as session, session.request(method, fleet.http + path, **options) as response:
        is_json = response.content_type == "application/json"
        return response.status, response.headers, await response.json() if is_json else await response.text()


async def test_a_key_is_needed_where_there_are_keys(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_key=("first", "zweiter-ß")) as fleet:
        await fleet.pair()
        for key in ("first", "zweiter-ß"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await ask(fleet, "GET", "/v1/models", headers=headers))[0] == 200
        for given in ("", "Bearer", "Bearer ", "Bearer second", "Basic first", "first", "Bearer firs"):
            for path in ("/v1/models", "/version", "/load", "/nothing"):
                status, answer_headers, answer = await ask(fleet, "GET", path, headers={"Authorization": given})
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert answer_headers["WWW-Authenticate"] == "Bearer"
                assert "Authorization: Bearer" in answer["error"]["message"]
        assert [(await ask(fleet, "GET", path))[0] for path in ("/health", "/ping", "/metrics")] == [200] * 3
        with pytest.raises(openai.AuthenticationError):
            await fleet.client.chat.completions.create(model=MODEL, messages=HI)
        good = fleet.client.with_options(api_key="first")
        assert (await good.chat.completions.create(model=MODEL, messages=HI)).choices


def test_keys_and_origins_of_the_command_line() -> None:
    line = ["--api-key", "a", "--api-key", "b", "--allowed-origins", PAGE]
    settings = read_settings(GatewaySettings, line)
    assert (settings.api_key, settings.allowed_origins) == (("a", "b"), (PAGE,))
    assert settings.as_logged()["api_key"] == ["***", "***"]


@pytest.mark.parametrize(
    ("written", "said"),
    [("{", "tenants.*line 1 column 2"), ("[1]", "--tenants: .*dictionary"), ('{"a": 5}', "--tenants")],
)
def test_tenants_of_another_shape_are_told(monkeypatch: pytest.MonkeyPatch, written: str, said: str) -> None:
    monkeypatch.setenv("HALFMOON_GATEWAY_TENANTS", written)
    with pytest.raises(InvalidRequest, match=said):
        read_settings(GatewaySettings, [])


@pytest.mark.parametrize(("allowed", "told"), [((PAGE,), PAGE), (("*",), "*"), (("https://other.example",), None)])
async def test_pages_of_other_origins(tmp_path: Path, allowed: tuple[str, ...], told: str | None) -> None:
    asking = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    async with running_fleet(tmp_path, allowed_origins=allowed, api_key=("k",)) as fleet:
        status, headers, _ = await ask(fleet, "OPTIONS", "/v1/chat/completions", headers=asking)
        assert headers.get("Access-Control-Allow-Origin") == told
        if told is None:
            assert status == 401
        else:
            assert (status, headers["Access-Control-Allow-Headers"]) == (204, "x-a")
            assert "POST" in headers["Access-Control-Allow-Methods"]
        status, headers, _ = await ask(fleet, "GET", "/v1/models", headers={"Origin": PAGE})
        assert (status, headers.get("Access-Control-Allow-Origin")) == (401, told)  # an error can be read, too
        assert headers["Vary"] == "Origin"
        exposed = headers.get("Access-Control-Expose-Headers", "x-ratelimit-reset-tokens, Retry-After")
        assert {"x-ratelimit-reset-tokens", "Retry-After"} <= set(exposed.split(", "))
        assert "Access-Control-Allow-Origin" not in (await ask(fleet, "GET", "/health"))[1]


async def test_without_allowed_origins_nothing_is_said_of_them(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, headers, _ = await ask(fleet, "GET", "/health", headers={"Origin": PAGE})
        assert not [name for name in headers if name.startswith("Access-Control")]


async def test_long_and_many_headers_are_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_header_bytes=300, max_headers=20) as fleet:
        await fleet.pair()
        assert (await ask(fleet, "GET", "/health", headers={"X-A": "a" * 200}))[0] == 200
        many = {f"X-{one}": "a" for one in range(30)}
        for path, headers, limit in (
            ("/health", {"X-A": "a" * 400}, "--max-header-bytes"),
            ("/health?" + "a" * 400, {}, "--max-header-bytes"),
            ("/health", many, "--max-headers"),
        ):
            status, _, answer = await ask(fleet, "GET", path, headers=headers)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert limit in answer["error"]["message"]


async def test_what_is_not_http_is_told_so(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        host, _, port = fleet.http.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01 what\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert json.loads(body)["error"]["message"] == "this is not a valid HTTP request"


async def test_tokenize_and_detokenize(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        asked: list[dict[str, Any]] = [
            {"model": MODEL, "prompt": "ab", "return_token_strs": True},
            {"messages": HI, "add_generation_prompt": False},
            {"prompt": "x" * 4_090, "add_special_tokens": False},
        ]
        answers = [(await ask(fleet, "POST", "/tokenize", json=body))[2] for body in asked]
        status, _, text = await ask(fleet, "POST", "/detokenize", json={"tokens": [*b"ab", EOS]})
    assert answers[0] == {
        "count": 2,
        "max_model_len": CONTEXT_TOKENS,
        "tokens": [97, 98],
        "token_strs": ["<97>", "<98>"],
    }
    assert bytes(answers[1]["tokens"]) == b"user:hi\nopen"
    assert answers[1]["token_strs"] is None
    assert answers[2]["count"] == 4_090  # in a thread
    assert (status, text) == (200, {"prompt": "ab"})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": ""}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, path: str, body: dict[str, Any], param: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        status, _, answer = await ask(fleet, "POST", path, json=body)
        assert (status, answer["error"]["param"]) == (400, param)
        status, _, answer = await ask(fleet, "POST", path, json={**body, "model": "other"})
        assert status in (400, 404)


async def test_the_model_card(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        (card,) = (await ask(fleet, "GET", "/v1/models"))[2]["data"]
    assert (card["id"], card["root"], card["parent"]) == (MODEL, "byte-model", None)
    assert card["max_model_len"] == CONTEXT_TOKENS
