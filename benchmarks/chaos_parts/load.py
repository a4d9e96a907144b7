"""Clients that stream answers and notice what a fault does to them: lost answers, changed texts, pauses."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

_WORDS = (
    *("harbour", "lantern", "gravel", "orchard", "winter", "signal", "copper", "meadow", "ledger", "stone", "river"),
    *("thread", "paper", "morning", "anchor", "window", "engine", "valley", "hammer", "cloud", "market", "saddle"),
    *("mirror", "forest", "candle", "bridge", "needle", "summer", "barrel", "ribbon"),
)
_REPEAT_WITHIN_S = 60.0  # a gateway keeps an answer this long for whoever repeats its request
_BETWEEN_REPEATS_S = 0.3


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of `num_tokens` tokens each, as many at once as there are clients.

    `salt` keeps the prompts out of every cache; without one they may be found there. A client that `repeats` sends a
    request again with the same id when its connection breaks, and names the last event that it has.
    """

    num_clients: int = 7
    num_streams: int = 14
    num_tokens: int = 100
    num_words: int = 150
    salt: str = ""
    repeats: bool = False
    model: str = "demo"
    seed: int = 11

    def body(self, index: int) -> dict[str, object]:
        """The request of one stream: the same text every time."""
        words = random.Random(f"{self.seed}/{index}").choices(_WORDS, k=self.num_words)
        body: dict[str, object] = {
            "model": self.model,
            "prompt": f"Note {index}: {' '.join(words)}.",
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
        }
        return body | ({"cache_salt": f"{self.salt}-{index}"} if self.salt else {})


@dataclass(slots=True)
class Stream:
    """What one client saw of one answer. Times are `time.monotonic()`."""

    started_s: float = 0.0
    pieces: list[str] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    last_event_id: str = ""
    num_repeats: int = 0
    error: str | None = "not answered"

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    @property
    def is_refused(self) -> bool:
        """Whether it was told to come back later, before its first token."""
        return not self.pieces and self.error is not None and "status 503" in self.error

    @property
    def ttft_s(self) -> float:
        """Time to the first token; 0 without one."""
        return self.arrivals_s[0] - self.started_s if self.arrivals_s else 0.0

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two tokens."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


async def run_load(url: str, load: Load) -> list[Stream]:
    """Runs all streams to their ends and returns them in order."""
    streams = [Stream() for _ in range(load.num_streams)]
    waiting = iter(range(load.num_streams))

    async def client() -> None:
        connector = aiohttp.TCPConnector(force_close=True)  # a client of its own each time: no pooled dead connection
        async with aiohttp.ClientSession(connector=connector) as session:
            for index in waiting:
                await _stream(session, url, load, index, streams[index])

    async with asyncio.TaskGroup() as clients:
        for _ in range(load.num_clients):
            clients.create_task(client())
    return streams


async def _stream(session: aiohttp.ClientSession, url: str, load: Load, index: int, stream: Stream) -> None:
    """Fills `stream`. A client that repeats tries for a minute after the first break."""
    body, request_id = load.body(index), f"chaos-{load.salt or random.randrange(1 << 32)}-{index}"
    stream.started_s = time.monotonic()
    give_up_s = 0.0
    while True:
        try:
            await _read(session, url, body, {"X-Request-Id": request_id}, stream)
            return
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            stream.error = f"{type(error).__name__}: {error}"[:200]
        give_up_s = give_up_s or time.monotonic() + _REPEAT_WITHIN_S
        if not load.repeats or time.monotonic() > give_up_s:
            return
        stream.num_repeats += 1
        await asyncio.sleep(_BETWEEN_REPEATS_S)


async def _read(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], headers: dict[str, str], stream: Stream
) -> None:
    """Reads events until the end. Raises ClientError for a connection that breaks and an error that may pass."""
    if stream.last_event_id:
        headers = {**headers, "Last-Event-ID": stream.last_event_id}
    else:
        stream.pieces.clear()  # nothing to go on from: the answer begins again
    timeout = aiohttp.ClientTimeout(total=600, sock_read=120)
    async with session.post(f"{url}/v1/completions", json=body, headers=headers, timeout=timeout) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"status {response.status}: {(await response.text())[:150]}")
        async for raw in response.content:
            name, _, value = raw.decode().rstrip("\r\n").partition(": ")
            if name == "id":
                stream.last_event_id = value
            elif name == "data" and value == "[DONE]":
                stream.error = None
                return
            elif name == "data":
                _take(json.loads(value), stream)
    raise aiohttp.ClientError("the stream ended before its last event")


def _take(event: dict[str, object], stream: Stream) -> None:
    if "error" in event:
        raise aiohttp.ClientError(f"error event: {event['error']}"[:200])
    choices = event.get("choices")
    assert isinstance(choices, Sequence)
    for choice in choices:
        if choice["text"]:
            stream.pieces.append(choice["text"])
            stream.arrivals_s.append(time.monotonic())
