"""One request through the gateway, as a client sees it: when its tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.profiling.target import Cluster

_CALL = aiohttp.ClientTimeout(total=120)
_TOKEN = b'"text"'  # in every event with a token


class ServedRequest:
    """Owns what has come of one answer: when its events came, by `time.monotonic`. A late one has several tokens."""

    def __init__(self) -> None:
        self.sent_s = time.monotonic()
        self.came_s: list[float] = []
        self._has_ended = False
        self._changed = asyncio.Event()

    @property
    def ttft_s(self) -> float:
        """There must be a token."""
        return self.came_s[0] - self.sent_s

    async def events(self, num: int) -> Sequence[float]:
        """When all so far came, at least so many. Raises Unavailable where the answer ends before."""
        while len(self.came_s) < num:
            if self._has_ended:
                raise Unavailable(f"an answer of the gateway ended after {len(self.came_s)} events of {num}")
            await self._news()
        return self.came_s

    async def whole(self) -> Sequence[float]:
        """When all came, three at least. Raises Unavailable."""
        while not self._has_ended:
            await self._news()
        return await self.events(3)

    async def _news(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def hear(self, received: bytes) -> None:
        """The next part of the stream."""
        self.came_s += [time.monotonic()] * received.count(_TOKEN)
        self._changed.set()

    def end(self) -> None:
        """Nothing more will come."""
        self._has_ended = True
        self._changed.set()


@asynccontextmanager
async def served(
    session: aiohttp.ClientSession, cluster: Cluster, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[ServedRequest]:
    """A request that is answered inside the block, and given up at its end.

    Raises InvalidRequest where the gateway wants a key, Unavailable where it fails.
    """
    body = {"model": cluster.served_model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    data = json.dumps({**body, "stream": True})
    request = ServedRequest()
    try:
        async with session.post(f"{cluster.url}/v1/completions", data=data, timeout=_CALL) as response:
            if response.status in (401, 403):
                raise InvalidRequest(f"the gateway at {cluster.url} wants an API key: --api-key", param="api_key")
            response.raise_for_status()
            reading = asyncio.create_task(_read(response, request))
            try:
                yield request
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"the gateway at {cluster.url} failed a request: {error!r}") from error


async def _read(response: aiohttp.ClientResponse, request: ServedRequest) -> None:
    try:
        async for received in response.content.iter_any():
            request.hear(received)
    finally:
        request.end()
