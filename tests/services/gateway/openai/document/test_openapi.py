"""The served OpenAPI document, and whatever bodies it allows: none of them is an internal error."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok

from services.gateway.app import make_app
from services.gateway.openai.document.openapi import openapi_document
from tests.services.gateway.fakes import MODEL, PATIENCE_S, Script, running_fleet

OPERATIONS = {
    f"{found.ok().method.upper()} {found.ok().path}": found.ok()
    for found in schemathesis.openapi.from_dict(openapi_document()).get_all_operations()
    if isinstance(found, Ok)
}
EXPECTED = (200, 400, 401, 404, 405, 409, 413, 415, 422)  # there is capacity, and nothing breaks


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway with fake workers, on a loop of its own: the requests come from outside of it."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve(path: Path) -> None:
        async with running_fleet(path) as fleet:
            await fleet.pair(Script('{"text": "héllo"}'))
            stop = asyncio.Event()
            ready.set_result((fleet.http, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve(tmp_path_factory.mktemp("openapi"))))
    thread.start()
    http, loop, stop = ready.result(PATIENCE_S)
    yield http
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def test_it_is_served(address: str) -> None:
    assert len(OPERATIONS) == sum(len(methods) for methods in openapi_document()["paths"].values())
    document = requests.get(f"{address}/openapi.json", timeout=PATIENCE_S).json()
    assert document == json.loads(json.dumps(openapi_document()))
    assert document["openapi"].startswith("3.1")
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {one["name"] for one in chat["parameters"]} == {"Idempotency-Key", "X-Request-Id", "Last-Event-ID"}
    assert "x-ratelimit-remaining-tokens" in chat["responses"]["200"]["headers"]
    assert "Retry-After" in chat["responses"]["429"]["headers"]


class _AnyHandlers:
    """Stands for the endpoints of a gateway, of which only the routes are read."""

    def __getattr__(self, name: str) -> Any:
        async def handler(request: Any) -> Any:
            raise NotImplementedError

        return handler


class _AnyEndpoints:
    max_body_bytes = 1

    def __getattr__(self, name: str) -> Any:
        return _AnyHandlers()


def test_all_routes_of_clients_are_in_it() -> None:
    stand_in = cast(Any, _AnyEndpoints())
    routes = {
        (route.resource.canonical.replace(":.+", ""), route.method.lower())
        for route in make_app(stand_in, stand_in).router.routes()
        if route.resource is not None and route.method not in ("HEAD", "*")
    }
    refused = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"}
    documents = {"/docs", "/openapi.json"}
    found = {(path, method) for path, methods in openapi_document()["paths"].items() for method in methods}
    of_operators = {("/halfmoon/v1/cluster", "get")}
    clients = {one for one in routes if not one[0].startswith("/halfmoon/") and one[0] not in refused | documents}
    assert found == clients | of_operators


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_streams_are_as_it_says(path: str, address: str) -> None:
    """Checkers hold each event against the schema of a stream: those of messages and responses have a name, too."""
    prompt: dict[str, Any] = (
        {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    prompt = {"input": "a"} if path == "/v1/responses" else prompt
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "stream": True, **prompt}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    case = OPERATIONS[f"POST {path}"].Case(body=body, media_type="application/json")
    response = case.call(base_url=address)
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response)


# The gateway's thread may draw from `random` while a strategy draws a case: hypothesis takes that for the strategy's.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_that_it_allows_is_an_internal_error(name: str, address: str) -> None:
    @settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))
    @given(OPERATIONS[name].as_strategy())
    def attempt(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # else hardly one passes the first check
        sent = case.as_transport_kwargs(base_url=address)
        response = requests.request(**sent, timeout=PATIENCE_S)
        assert response.status_code in EXPECTED, (sent, response.text)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    attempt()
