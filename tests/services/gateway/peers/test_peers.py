"""Two gateways: what one would refuse, the other answers."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.models.latency import PrefillSample
from services.gateway.peers.offer import OFFER_HEADER, Offer
from tests.services.gateway.fakes import FINGERPRINT, MODEL, FakeWorker, Fleet, Script, running_fleet, soon

PROMPT = "a prompt of several blocks, each of them of eight tokens"
STRICT = QosClass("default", ttft_s=5.0)
HEADERS = {"Content-Type": "application/json"}


class Pair:
    """A gateway whose prefill worker is far too slow, and its peer."""

    def __init__(self, full: Fleet, peer: Fleet) -> None:
        self.full = full
        self.peer = peer
        self.url = peer.http


def measured(fleet: Fleet, worker: FakeWorker, seconds_per_token: float) -> None:
    """As if prefills had been measured on it."""
    member = fleet.cluster.worker(worker.worker_id).member
    for number in range(20):
        sample = PrefillSample(10.0 + number, 0, (10 + number) * seconds_per_token)
        fleet.cluster.membership.note_prefilled("", member, sample, 0.0)


@asynccontextmanager
async def full_fleet(tmp_path: Path, peer: str, **settings: Any) -> AsyncIterator[Fleet]:
    """A gateway that refuses every longer prompt, with one peer."""
    async with running_fleet(tmp_path / "full", **{"peer": (peer,), "peer_wait_s": 20.0, **settings}) as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        fleet.gateway.routing.admission.classes = ClassTable((STRICT,))
        yield fleet


@asynccontextmanager
async def running_pair(tmp_path: Path, script: Script | None = None, **settings: Any) -> AsyncIterator[Pair]:
    async with running_fleet(tmp_path / "peer", **settings) as peer:
        await peer.pair(script)
        async with full_fleet(tmp_path, peer.http, peer_key=settings.get("api_key", ())) as full:
            yield Pair(full, peer)


async def post(
    fleet: Fleet, path: str = "/v1/completions", headers: dict[str, str] | None = None, **more: Any
) -> tuple[int, dict[str, str], bytes]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.http + path, data=json.dumps(body), headers={**HEADERS, **(headers or {})}) as response,
    ):
        return response.status, dict(response.headers), await response.read()


async def cluster(fleet: Fleet) -> dict[str, Any]:
    url = f"{fleet.http}/halfmoon/v1/cluster"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        found: dict[str, Any] = await response.json()
        return found


def rows(path: Path, columns: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path / "ledger.db") as connection:
        found = connection.execute(f"select {columns} from requests order by id").fetchall()
    connection.close()
    return found


async def test_a_peer_answers_what_would_be_refused(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        status, headers, body = await post(pair.full)
        metrics, shown = await pair.full.metrics(), await cluster(pair.full)
    answer = json.loads(body)
    assert (status, answer["choices"][0]["text"]) == (200, "hello")
    assert headers["Content-Type"].startswith("application/json")
    assert f'halfmoon_gateway_peer_offers_total{{outcome="served",peer="{pair.url}"}} 1.0' in metrics
    assert "halfmoon_gateway_refusals_total{" not in metrics
    assert shown["peers"] == [{"url": pair.url, "state": "closed", "offers": {"served": 1}}]
    columns = "status, http_status, peer, qos_class, prompt_tokens, output_tokens, ttft_s is null, prefill_worker"
    usage = (len(PROMPT), answer["usage"]["completion_tokens"])
    assert rows(tmp_path / "full", columns) == [("ok", 200, pair.url, "default", *usage, 0, None)]
    assert rows(tmp_path / "peer", columns)[0][:3] == ("ok", 200, None)


async def test_a_stream_passes_through_unchanged(tmp_path: Path) -> None:
    parts = [b"data: {}\n\n", b"data: [DO", b"NE]\n\n", b"\n: halfmoon [9, 4, 2]\n\n"]

    async def streams(request: web.Request) -> web.StreamResponse:
        if json.loads(request.headers[OFFER_HEADER])["step"] == "ask":
            return web.json_response({"ttft_s": 0.1, "tbt_s": 0.01})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    async with served(streams) as url, full_fleet(tmp_path, url) as full:
        status, headers, body = await post(full, stream=True)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert body == b"".join(parts)
    assert rows(tmp_path / "full", "status, prompt_tokens, cached_tokens, output_tokens") == [("ok", 9, 4, 2)]


async def test_a_stream_of_a_peer_is_read_as_any_other(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        stream = await soon(pair.full.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, stream=True))
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == "hello"
        await pair.full.until_idle()
    assert rows(tmp_path / "full", "status, prompt_tokens, output_tokens") == [("ok", len(PROMPT), 6)]


async def test_the_stream_is_seen_as_it_comes(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_pair(tmp_path, Script(decode_gate=gate)) as pair:
        stream = await soon(pair.full.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, stream=True))
        first = await soon(anext(aiter(stream)))
        assert first.choices[0].text == "h"
        gate.set()
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == "ello"


async def test_a_client_that_leaves_ends_the_answer_at_the_peer(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_pair(tmp_path, Script(decode_gate=gate)) as pair:
        stream = await soon(pair.full.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, stream=True))
        await soon(anext(aiter(stream)))
        await stream.close()
        await pair.peer.until_idle()
        gate.set()
    assert rows(tmp_path / "full", "status, peer") == [("cancelled", pair.url)]


async def test_peers_of_each_other_do_not_pass_a_request_around(tmp_path: Path) -> None:
    """The second one refuses it, and the client gets the refusal of the first."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    async with (
        full_fleet(tmp_path, f"http://127.0.0.1:{port}") as full,
        running_fleet(tmp_path / "peer", port=port, peer=(full.http,), peer_wait_s=20.0) as peer,
    ):
        prefill, _ = await peer.pair()
        measured(peer, prefill, 1.0)
        peer.gateway.routing.admission.classes = ClassTable((STRICT,))
        status, headers, body = await post(full)
        offers = [(await cluster(one))["peers"][0]["offers"] for one in (full, peer)]
    assert (status, json.loads(body)["error"]["reason"]) == (429, "ttft")
    assert int(headers["Retry-After"]) >= 1
    assert offers == [{"declined": 1}, {}]
    assert rows(tmp_path / "peer", "status") == []


async def test_a_peer_that_would_be_late_is_not_used(tmp_path: Path) -> None:
    """It would admit the request, without a class of its own; the targets are those of who offers."""
    async with running_pair(tmp_path) as pair:
        prefill = next(one for one in pair.peer.by_address.values() if one.worker_id == "p0")
        measured(pair.peer, prefill, 1.0)
        status, _, _ = await post(pair.full)
        shown = await cluster(pair.full)
    assert (status, shown["peers"][0]["offers"], prefill.calls.prefills) == (429, {"late": 1}, [])


async def test_a_peer_that_is_away_costs_nothing_but_the_refusal(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with full_fleet(tmp_path, url) as full:
            statuses = [(await post(full))[0] for _ in range(4)]
            shown = await cluster(full)
    assert statuses == [429] * 4
    assert shown["peers"] == [{"url": url, "state": "open", "offers": {"away": 2, "paused": 2}}]


async def test_a_peer_that_does_not_answer_is_left(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    async with served(silent) as url, full_fleet(tmp_path, url, peer_wait_s=0.01) as full:
        status, _, _ = await soon(post(full))
        shown = await cluster(full)
        never.set()
    assert (status, shown["peers"][0]["offers"]) == (429, {"slow": 1})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_peer_that_breaks_its_word_costs_the_refusal(tmp_path: Path, *, stream: bool) -> None:
    """It predicts to be in time, and then begins an answer that it does not send, or none."""

    async def breaks(request: web.Request) -> web.StreamResponse:
        if json.loads(request.headers[OFFER_HEADER])["step"] == "ask":
            return web.json_response({"ttft_s": 0.1, "tbt_s": None})
        if not stream:
            response = web.StreamResponse(headers=HEADERS)
            await response.prepare(request)
            await response.write(b'{"half of')
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError

    async with served(breaks) as url, full_fleet(tmp_path, url) as full:
        status, _, body = await soon(post(full, stream=stream))
        shown = await cluster(full)
    assert (status, json.loads(body)["error"]["code"]) == (429, "slo_would_be_missed")
    assert shown["peers"][0]["offers"] == {"failed": 1}
    assert rows(tmp_path / "full", "status, peer") == [("rejected", None)]


async def test_a_stream_that_breaks_off_at_the_peer_is_cut(tmp_path: Path) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        if json.loads(request.headers[OFFER_HEADER])["step"] == "ask":
            return web.json_response({"ttft_s": 0.1, "tbt_s": None})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await taken.wait()
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError

    taken = asyncio.Event()
    async with served(breaks) as url, full_fleet(tmp_path, url) as full, aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        async with session.post(f"{full.http}/v1/completions", json=body) as response:
            assert await soon(response.content.readline()) == b"data: {}\n"
            taken.set()
            with pytest.raises(aiohttp.ClientError):
                await soon(response.read())
        shown = await cluster(full)
    assert shown["peers"][0]["offers"] == {"broken": 1}
    assert rows(tmp_path / "full", "status, peer") == [("error", url)]


async def test_the_peer_gets_its_own_key_and_nothing_of_the_client(tmp_path: Path) -> None:
    seen: list[web.Request] = []

    async def declines(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(status=429)

    async with served(declines) as url, full_fleet(tmp_path, url, peer_key=("sk-peer",), api_key=("sk-own",)) as full:
        own = {"Authorization": "Bearer sk-own", "Cookie": "a=b", "X-Request-Id": "mine", "X-Customer-Tier": "gold"}
        status, _, _ = await post(full, headers=own)
    (request,) = seen
    offer = Offer.model_validate_json(request.headers[OFFER_HEADER])
    assert status == 429
    assert request.headers["Authorization"] == "Bearer sk-peer"
    assert not {"Cookie", "X-Request-Id", "X-Customer-Tier"} & set(request.headers)
    assert (offer.step, offer.model, offer.qos_class) == ("ask", FINGERPRINT, "default")
    assert offer.cache_salt  # what one client has cached there is no other's


async def test_a_peer_checks_its_key_and_its_model(tmp_path: Path) -> None:
    offer = Offer(step="ask", gateway="g", model="another")
    async with running_pair(tmp_path, api_key=("sk-peer",)) as pair:
        assert (await post(pair.full))[0] == 200
        assert (await post(pair.peer))[0] == 401
        key = {"Authorization": "Bearer sk-peer"}
        other = await post(pair.peer, headers={**key, OFFER_HEADER: offer.model_dump_json()})
        broken = await post(pair.peer, headers={**key, OFFER_HEADER: "{}"})
    assert (other[0], json.loads(other[2])["error"]["param"]) == (400, OFFER_HEADER)
    assert broken[0] == 400


async def test_a_class_of_the_same_name_is_used(tmp_path: Path) -> None:
    """As at the peer: here without targets, and a place before others."""
    async with running_pair(tmp_path) as pair:
        first = QosClass("default", priority=-5, degradation=("cap_max_tokens",), capped_tokens=1, ttft_s=1e-6)
        pair.peer.gateway.routing.admission.classes = ClassTable((first,))
        prefill = next(one for one in pair.peer.by_address.values() if one.worker_id == "p0")
        measured(pair.peer, prefill, 0.01)
        status, _, _ = await post(pair.full)
    assert (status, prefill.calls.prefills) == (429, [])


async def test_what_leaves_something_behind_is_not_offered(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        kept = await post(pair.full, "/v1/responses", prompt=None, input=PROMPT, max_tokens=None)
        gone = await post(pair.full, "/v1/responses", prompt=None, input=PROMPT, max_tokens=None, store=False)
    assert (kept[0], gone[0]) == (429, 200)


@asynccontextmanager
async def served(handler: Any) -> AsyncIterator[str]:
    """The address of a server whose every path is this handler's."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
