"""What web pages cannot do to a gateway on loopback: rebind their name to it, write to it, run requests on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.services.gateway.fakes import Fleet, running_fleet

EVIL = "http://evil.example"
PAGE = "https://page.example"
CLASS = "/halfmoon/v1/classes/gold"
COMPLETION = json.dumps({"model": "demo", "prompt": "hi", "max_tokens": 1})


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        yield fleet


async def raw(fleet: Fleet, method: str, path: str, *headers: str, body: str = "") -> tuple[int, Any]:
    """Status and JSON of a request of exactly these headers, as a browser or an attacker's program would send it."""
    address, _, port = fleet.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(address, int(port))
    length = f"Content-Length: {len(body)}"
    writer.write("\r\n".join((f"{method} {path} HTTP/1.1", *headers, length, "Connection: close", "", body)).encode())
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status = int(head.split()[1])
    return status, json.loads(answer) if b"application/json" in head else answer.decode()


@pytest.mark.parametrize("path", ["/halfmoon/v1/requests", "/v1/models", "/health", "/metrics", "/nothing"])
async def test_a_rebound_name_is_not_answered(fleet: Fleet, path: str) -> None:
    status, answer = await raw(fleet, "GET", path, "Host: evil.example:8000")
    assert (status, answer["error"]["code"]) == (421, "host_not_allowed")
    assert "gateway.allowed_hosts" in answer["error"]["message"]
    assert (await raw(fleet, "GET", path, "Host: localhost:8000"))[0] in (200, 404)


async def test_a_rebound_page_writes_nothing(fleet: Fleet) -> None:
    same_origin = ("Host: evil.example", f"Origin: {EVIL}", "Content-Type: application/json")
    assert (await raw(fleet, "PUT", CLASS, *same_origin, body="{}"))[0] == 421
    assert (await raw(fleet, "POST", "/v1/completions", *same_origin, body=COMPLETION))[0] == 421
    preflight = ("Access-Control-Request-Method: PUT", "Host: evil.example", f"Origin: {EVIL}")
    assert (await raw(fleet, "OPTIONS", CLASS, *preflight))[0] == 421
    assert (await raw(fleet, "GET", "/halfmoon/v1/classes", "Host: localhost"))[1]["classes"] == []


async def test_two_hosts_are_both_checked(fleet: Fleet) -> None:
    assert (await raw(fleet, "GET", "/health", "Host: localhost", "Host: evil.example"))[0] in (400, 421)


@pytest.mark.parametrize("host", ["[::1].evil.example", "[::1]evil:8000", "localhost, evil.example", "localhost:99999"])
async def test_what_only_begins_like_loopback_is_foreign(fleet: Fleet, host: str) -> None:
    assert (await raw(fleet, "GET", "/halfmoon/v1/requests", f"Host: {host}"))[0] in (400, 421)


async def test_the_host_of_an_absolute_target_counts(fleet: Fleet) -> None:
    for target in ("http://evil.example/halfmoon/v1/requests", "HTTP://evil.example:8000/v1/models"):
        assert (await raw(fleet, "GET", target, "Host: localhost:8000"))[0] == 421
        own = target.replace("evil.example", "localhost")
        assert (await raw(fleet, "GET", own, "Host: localhost:8000"))[0] == 200
        assert (await raw(fleet, "GET", own, "Host: evil.example"))[0] == 421
    for target in ("ftp://localhost/v1/models", "localhost:8000"):
        assert (await raw(fleet, "GET", target, "Host: localhost"))[0] in (400, 404)
    page = ("Host: localhost:8000", "Origin: http://localhost:8000", "Content-Type: application/json")
    assert (await raw(fleet, "PUT", f"http://localhost:1{CLASS}", *page, body="{}"))[0] == 403


async def test_two_origins_are_both_checked(fleet: Fleet) -> None:
    own = "Origin: http://localhost:8000"
    for origins in ((own, f"Origin: {EVIL}"), (f"Origin: {EVIL}", own), (f"{own}, {EVIL}",)):
        headers = ("Host: localhost:8000", *origins, "Content-Type: application/json")
        assert (await raw(fleet, "PUT", CLASS, *headers, body="{}"))[0] in (400, 403), origins


async def test_without_a_host_it_is_no_browser(fleet: Fleet) -> None:
    assert (await raw(fleet, "GET", "/health"))[0] in (200, 400)


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:3000", "https://localhost:1"])
async def test_control_writes_of_foreign_pages_are_refused(fleet: Fleet, origin: str) -> None:
    for method, path in (("PUT", CLASS), ("DELETE", f"{CLASS}?version=1"), ("PUT", "/halfmoon/v1/admission")):
        for content_type in ("application/json", "text/plain"):
            headers = ("Host: localhost:8000", f"Origin: {origin}", f"Content-Type: {content_type}")
            status, answer = await raw(fleet, method, path, *headers, body="{}")
            assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")
            assert "gateway.allowed_origins" in answer["error"]["message"]
    assert (await raw(fleet, "GET", "/halfmoon/v1/classes", "Host: localhost"))[1]["classes"] == []


async def test_control_writes_are_json(fleet: Fleet) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        headers = ("Host: localhost", f"Content-Type: {content_type}")
        status, answer = await raw(fleet, "PUT", CLASS, *headers, body="{}")
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type"), content_type
        assert "Content-Type: application/json" in answer["error"]["message"]
    own_page = (
        "Host: localhost:8000",
        "Origin: http://localhost:8000",
        "Content-Type: application/json; charset=utf-8",
    )
    assert (await raw(fleet, "PUT", CLASS, *own_page, body="{}"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_what_a_foreign_page_sends_unasked_runs_nothing(fleet: Fleet, path: str) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", ""):
        headers = ("Host: localhost:8000", f"Origin: {EVIL}", f"Content-Type: {content_type}")
        status, answer = await raw(fleet, "POST", path, *headers, body=COMPLETION)
        assert (status, answer["error"]["code"]) == (403, "origin_not_allowed"), content_type
    assert not any(worker.calls.prefills for worker in fleet.by_address.values())


async def test_clients_that_are_no_pages_need_no_content_type(fleet: Fleet) -> None:
    form = ["Content-Type: application/x-www-form-urlencoded"]
    json_page = [f"Origin: {EVIL}", "Content-Type: application/json"]  # its browser was refused in the preflight
    for headers in ([], form, json_page):
        status, answer = await raw(fleet, "POST", "/tokenize", "Host: localhost", *headers, body='{"prompt": "hi"}')
        assert status == 200, answer


async def test_pages_and_names_that_are_allowed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, allowed_hosts=("chat.example",), allowed_origins=(PAGE,)) as fleet:
        headers = ("Host: chat.example", f"Origin: {PAGE}")
        assert (await raw(fleet, "PUT", CLASS, *headers, "Content-Type: application/json", body="{}"))[0] == 200
        assert (await raw(fleet, "POST", "/tokenize", *headers, "Content-Type: text/plain", body='{"prompt": ""}'))[
            0
        ] == 200
        assert (await raw(fleet, "GET", "/health", "Host: evil.example"))[0] == 421


async def test_all_origins_are_not_all_operators(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, allowed_origins=("*",)) as fleet:
        for path, told in (("/v1/models", "*"), ("/halfmoon/v1/requests", None)):
            url = fleet.http + path
            async with aiohttp.ClientSession() as session, session.get(url, headers={"Origin": EVIL}) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == told
        headers = ("Host: localhost", f"Origin: {EVIL}")
        assert (await raw(fleet, "POST", "/tokenize", *headers, "Content-Type: text/plain", body='{"prompt": ""}'))[
            0
        ] == 200
        assert (await raw(fleet, "PUT", CLASS, *headers, "Content-Type: application/json", body="{}"))[0] == 403
