"""One peer: its address, its key, and whether it may be asked now."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.breaker import CircuitBreaker
from services.gateway.http.request_ids import OFFERED_ID_HEADER
from services.gateway.peers.offer import OFFER_HEADER, Offer
from services.gateway.telemetry.recent_telemetry import PeerOutcome

log = logging.getLogger(__name__)

_MAX_ASKED = 16  # at once; more requests than that are refused here without asking
_MAX_FAILURES = 2
_PAUSE_S = 2.0  # after that; doubles up to 32 s
_MAX_ANSWER_BYTES = 4_096
_OK, _REFUSED, _SERVER_ERROR = 200, 429, 500
_FAILURES = (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError)


class OfferedRequest(NamedTuple):
    """A request as it is sent to peers."""

    path: str
    body: bytes
    request_id: str


class PeerPrediction(NamedTuple):
    """What a peer predicts for a request, from now."""

    ttft_s: float
    tbt_s: float | None  # None for one token


class NotTaken(Exception):
    """The peer does not answer this request. `outcome` says why."""

    def __init__(self, outcome: PeerOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class PeerGateway:
    """Owns whether the peer may be asked: not after failures for a while, and not by too many at once."""

    def __init__(self, url: str, key: str | None, trusted: ssl.SSLContext | None, clock: Callable[[], float]) -> None:
        self.url = url
        self.breaker = CircuitBreaker(_MAX_FAILURES, _PAUSE_S)
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._trusted = trusted
        self._clock = clock
        self._num_asked = 0

    async def ask(
        self, session: aiohttp.ClientSession, request: OfferedRequest, offer: Offer, within_s: float
    ) -> PeerPrediction:
        """What the peer predicts. Raises NotTaken."""
        if self._num_asked >= _MAX_ASKED:
            raise NotTaken("busy")
        if not self.breaker.allows(self._clock()):
            raise NotTaken("paused")
        self._num_asked += 1
        try:
            async with asyncio.timeout(within_s):
                response = await self._post(session, request, offer)
                with closing(response):
                    told = json.loads(await response.content.read(_MAX_ANSWER_BYTES))
            prediction = PeerPrediction(float(told["ttft_s"]), told["tbt_s"] and float(told["tbt_s"]))
        except (NotTaken, *_FAILURES) as error:
            raise self._not_taken(error) from error
        except asyncio.CancelledError:  # the client has left, which says nothing of the peer
            self.breaker.succeeded()
            raise
        finally:
            self._num_asked -= 1
        self.breaker.succeeded()
        return prediction

    @asynccontextmanager
    async def take(
        self, session: aiohttp.ClientSession, request: OfferedRequest, offer: Offer, head_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The peer's answer, whose head comes with the first token. Raises NotTaken while nothing has come."""
        try:
            async with asyncio.timeout(head_s):
                response = await self._post(session, request, offer)
        except (NotTaken, *_FAILURES) as error:
            reason = self._not_taken(error)
            raise NotTaken("declined" if reason.outcome == "declined" else "failed") from error
        with closing(response):
            yield response

    async def _post(
        self, session: aiohttp.ClientSession, request: OfferedRequest, offer: Offer
    ) -> aiohttp.ClientResponse:
        own = {OFFER_HEADER: offer.model_dump_json(), OFFERED_ID_HEADER: request.request_id}
        response = await session.post(
            self.url + request.path,
            data=request.body,
            headers={**self._headers, **own},
            ssl=self._trusted or True,
            allow_redirects=False,
        )
        if response.status == _OK:
            return response
        with closing(response):
            if response.status == _REFUSED:
                raise NotTaken("declined")
            text = await response.content.read(_MAX_ANSWER_BYTES)
        fields = {"peer": self.url, "status": response.status, "answer": text.decode(errors="replace")}
        log.warning("peer.not_taken", extra=fields)
        raise NotTaken("away" if response.status >= _SERVER_ERROR else "unfit")

    def _not_taken(self, error: BaseException) -> NotTaken:
        """Notes why the peer does not answer. A refusal is not a failure."""
        if not isinstance(error, NotTaken):
            error = NotTaken("slow" if isinstance(error, TimeoutError) else "away")
        if error.outcome == "declined":
            self.breaker.succeeded()
        else:
            self.breaker.failed(self._clock())
            log.info("peer.failed", extra={"peer": self.url, "outcome": error.outcome, "state": self.breaker.state})
        return error


def peer_keys(urls: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str | None]]:
    """Address and key of each peer: one key for all, or one for each. Raises InvalidRequest."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise InvalidRequest(f"a peer is http://HOST:PORT or https://HOST:PORT, not {url!r}", param="peer")
    if len(keys) not in (0, 1, len(urls)):
        raise InvalidRequest("give one peer_key for all peers, or one for each in their order", param="peer_key")
    each = [None] * len(urls) if not keys else list(keys) * (len(urls) if len(keys) == 1 else 1)
    return [(url.rstrip("/"), key) for url, key in zip(urls, each, strict=True)]
