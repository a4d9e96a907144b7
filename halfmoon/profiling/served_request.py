"""Requests through the gateway, as a client sees them: token times, and overheads outside the workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import mean, median
from typing import NamedTuple

import aiohttp

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.target import Cluster

_CALL = aiohttp.ClientTimeout(total=120)
_TOKEN = b'"text"'  # in every event with a token
_PROMPT_TOKENS = 16  # short, because the difference of two prompts matters
_STEPS = 16
_REPEATS = 13


class ServedRequest:
    """Owns the event times of one answer, by `time.monotonic`. A late event may carry several tokens. Knows nothing of
    workers.
    """

    def __init__(self) -> None:
        self.sent_s = time.monotonic()
        self.event_times_s: list[float] = []
        self._has_ended = asyncio.Event()

    @property
    def ttft_s(self) -> float:
        """Time to the first token, which must have arrived."""
        return self.event_times_s[0] - self.sent_s

    async def whole(self) -> Sequence[float]:
        """The event times of the whole answer, at least one. Raises Unavailable."""
        await self._has_ended.wait()
        if not self.event_times_s:
            raise Unavailable("an answer of the gateway ended without a token")
        return self.event_times_s

    def feed(self, received: bytes) -> None:
        """Takes the next part of the stream."""
        self.event_times_s += [time.monotonic()] * received.count(_TOKEN)

    def end(self) -> None:
        """Ends the stream."""
        self._has_ended.set()


@asynccontextmanager
async def served(
    session: aiohttp.ClientSession, cluster: Cluster, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[ServedRequest]:
    """Sends a request, which is answered inside the block and dropped at its end.

    Raises InvalidRequest if the gateway requires a key, Unavailable if it fails.
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
            request.feed(received)
    finally:
        request.end()


class RequestTime(NamedTuple):
    """Medians, never below 0."""

    request_s: float  # until its prompt is with a prefill worker
    answer_s: float  # from the computed prompt to the token at the client
    token_s: float  # extra time of a served decode step, compared to one measured at the worker


async def measured_request_time(
    session: aiohttp.ClientSession, cluster: Cluster, prefill: WorkerProbe, decode: WorkerProbe
) -> RequestTime:
    """Measures requests to the gateway, each followed by the same work on the workers themselves.

    The worker's own answer time is the way back; the rest of the TTFT is the way there. Raises what `served` raises,
    and Unavailable where no answer shows the time of its steps.
    """
    ways_s, answers_s, tokens_s = [], [], []
    for _ in range(_REPEATS):
        async with served(session, cluster, prefill.prompt(_PROMPT_TOKENS), _STEPS + 2) as request:
            event_times_s = await request.whole()
        alone = await prefill.prefill(prefill.prompt(_PROMPT_TOKENS))
        steps = await decode.decode(1, _PROMPT_TOKENS, _STEPS)
        ways_s.append(request.ttft_s - alone.seconds - alone.answer_s)
        answers_s.append(alone.answer_s)
        num_steps = len(event_times_s) - 2  # after the hand-over
        if num_steps < 1:
            continue  # the gateway or this process stood still, and the answer came at once
        step_s = (event_times_s[-1] - event_times_s[1]) / num_steps
        tokens_s.append(step_s - mean(step.seconds for step in steps))
    if len(tokens_s) < 2:
        raise Unavailable(
            f"answers of the gateway at {cluster.url} come in one piece, so their steps cannot be timed: profile"
            " while nothing else keeps its host busy"
        )
    return RequestTime(*(max(median(some[1:]), 0.0) for some in (ways_s, answers_s, tokens_s)))
