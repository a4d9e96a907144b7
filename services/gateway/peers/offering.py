"""Offers what this gateway would refuse to its peers, and passes on the answer of the one that takes it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from halfmoon.errors import Unavailable
from halfmoon.policy.admission.refusal import PredictedLatency, missed_target
from halfmoon.policy.values import AdmissionTargets
from halfmoon.rpc.breaker import State as BreakerState
from halfmoon.rpc.tls.http_context import client_context
from services.gateway.peers.offer import Offer
from services.gateway.peers.peer_gateway import (
    NotTaken,
    OfferedRequest,
    PeerGateway,
    PeerPrediction,
    peer_keys,
)
from services.gateway.replies.passed_answer import PassedAnswer, without_end
from services.gateway.replies.sse_body import ClientGone
from services.gateway.request import GatewayRequest
from services.gateway.telemetry.recent_telemetry import PeerOutcome, RecentTelemetry

_EVENTS = "text/event-stream"
_MOST_HEAD_FACTOR = 2.0  # of the TTFT target, for the first token: later it would help nobody
_SILENT_S, _PROBE_S, _PROBES = 10, 5, 3  # TCP's own look at a connection on which nothing comes


class PeerSettings(NamedTuple):
    """Which peers there are, and how long they may take."""

    urls: Sequence[str] = ()
    keys: Sequence[str] = ()
    ca: Path | None = None
    wait_s: float = 0.5
    deadline_s: float = 600.0


class _Fit(NamedTuple):
    prediction: PeerPrediction
    peer: PeerGateway


class PeerGateways:
    """Owns the connections to the peers. Without peers it does nothing."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: PeerSettings,
        gateway_id: str,
        telemetry: RecentTelemetry,
        clock: Callable[[], float],
    ) -> None:
        self.peers = [
            PeerGateway(url, key, client_context(settings.ca, url), clock)
            for url, key in peer_keys(settings.urls, settings.keys)
        ]
        self._session = session
        self._settings = settings
        self._gateway_id = gateway_id
        self._telemetry = telemetry
        self._clock = clock

    def states(self) -> list[tuple[str, BreakerState]]:
        """Address of each peer, and whether it is asked: closed, or open after failures."""
        return [(peer.url, peer.breaker.state) for peer in self.peers]

    async def answer(
        self, http_request: web.Request, request: GatewayRequest, raw: bytes, model: str
    ) -> web.StreamResponse | None:
        """A peer's answer to a request that would be refused here, passed on; None if no peer is in time for it.

        `raw` is its body, `model` the fingerprint of what is to answer. Peers are asked all at once, and the one with
        the least predicted TTFT of those that meet the class's targets gets the request. Raises Unavailable if the
        answer breaks off, and ClientGone.
        """
        if not self.peers:
            return None
        offered = OfferedRequest(http_request.path, raw, request.request_id)
        salt = request.tenant_salt.hex()
        ask = Offer(
            step="ask", gateway=self._gateway_id, model=model, qos_class=request.qos.name, cache_salt=salt[-128:]
        )
        found = await asyncio.gather(*(self._asked(peer, offered, ask, request) for peer in self.peers))
        fits = sorted((fit for fit in found if fit is not None), key=lambda fit: fit.prediction.ttft_s)
        take = ask.model_copy(update={"step": "take"})
        for fit in fits:
            waited_s = self._clock() - request.arrived_s
            try:
                async with fit.peer.take(self._session, offered, take, self._head_s(request, waited_s)) as response:
                    request.passed = _begun(fit, waited_s)
                    return await self._passed_on(http_request, request, request.passed, response)
            except NotTaken as reason:
                self._note(fit.peer, reason.outcome)
        return None

    async def _asked(
        self, peer: PeerGateway, offered: OfferedRequest, offer: Offer, request: GatewayRequest
    ) -> _Fit | None:
        try:
            prediction = await peer.ask(self._session, offered, offer, self._settings.wait_s)
        except NotTaken as reason:
            self._note(peer, reason.outcome)
            return None
        waited_s = self._clock() - request.arrived_s
        latency = PredictedLatency(waited_s + prediction.ttft_s, prediction.tbt_s)
        if missed_target(latency, AdmissionTargets(request.qos.ttft_s, request.qos.tbt_s)) is None:
            return _Fit(prediction, peer)
        self._note(peer, "late")
        return None

    async def _passed_on(
        self, http_request: web.Request, request: GatewayRequest, passed: PassedAnswer, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        passed.begin(self._clock() - request.arrived_s)
        peer, content_type = passed.peer, response.content_type
        begun: web.StreamResponse | None = None
        try:
            if content_type != _EVENTS:
                body = await response.read()
                passed.end_whole(body, self._clock() - request.arrived_s)
                whole = web.Response(body=without_end(body), content_type=content_type)
                self._telemetry.peer_offers[peer, "served"] += 1
                return whole
            begun = web.StreamResponse(headers={"Content-Type": response.headers["Content-Type"]})
            begun.headers["Cache-Control"] = "no-cache"
            await _to_client(begun.prepare(http_request))
            async for part in response.content.iter_any():
                passed.add(part, self._clock() - request.arrived_s)
                await _to_client(begun.write(part))
            await _to_client(begun.write_eof())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if begun is None:
                request.passed = None
                raise NotTaken("failed") from error
            self._telemetry.peer_offers[peer, "broken"] += 1
            raise Unavailable(f"the answer of the peer {peer} broke off") from error
        passed.end()
        self._telemetry.peer_offers[peer, "served"] += 1
        return begun

    def _head_s(self, request: GatewayRequest, waited_s: float) -> float:
        if request.qos.ttft_s is None:
            return self._settings.deadline_s
        return max(_MOST_HEAD_FACTOR * request.qos.ttft_s - waited_s, self._settings.wait_s)

    def _note(self, peer: PeerGateway, outcome: PeerOutcome) -> None:
        self._telemetry.peer_offers[peer.url, outcome] += 1


@asynccontextmanager
async def peer_gateways(
    settings: PeerSettings, gateway_id: str, telemetry: RecentTelemetry, clock: Callable[[], float]
) -> AsyncIterator[PeerGateways]:
    """The peers, while inside. Raises InvalidRequest for wrong addresses, keys or authorities."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket)
    timeout = aiohttp.ClientTimeout(total=settings.deadline_s)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False
    ) as one:
        yield PeerGateways(one, settings, gateway_id, telemetry, clock)


def _begun(fit: _Fit, waited_s: float) -> PassedAnswer:
    return PassedAnswer(fit.peer.url, waited_s + fit.prediction.ttft_s, fit.prediction.tbt_s)


async def _to_client(writing: Awaitable[object]) -> None:
    """Raises ClientGone where the client's connection broke, which is not the peer's fault."""
    try:
        await writing
    except ConnectionError as error:
        raise ClientGone from error


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket on which a peer that has vanished is noticed within half a minute."""
    family, kind, protocol, _, _ = address
    one = socket.socket(family, kind, protocol)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    return one
