"""What a request's first token takes beside its prompt's computation: HTTP, placement, calls, the way back."""

from __future__ import annotations

import json
import time
from statistics import median

import aiohttp

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.target import Cluster

_PROMPT_TOKENS = 64
_REPEATS = 9
_CALL = aiohttp.ClientTimeout(total=120)


async def measured_request_s(session: aiohttp.ClientSession, cluster: Cluster, probe: WorkerProbe) -> float:
    """Median over requests to the gateway, each followed by the same work asked of a prefill worker itself.

    Never below 0. Raises InvalidRequest where the gateway wants a key, Unavailable where it fails.
    """
    taken = []
    for _ in range(_REPEATS):
        ttft_s = await _ttft_s(session, cluster, probe.prompt(_PROMPT_TOKENS))
        taken.append(ttft_s - (await probe.prefill(probe.prompt(_PROMPT_TOKENS))).seconds)
    return max(median(taken[1:]), 0.0)


async def _ttft_s(session: aiohttp.ClientSession, cluster: Cluster, prompt: list[int]) -> float:
    body = {"model": cluster.served_model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    sent_s = time.monotonic()
    first_s: float | None = None
    try:
        async with session.post(f"{cluster.url}/v1/completions", data=json.dumps(body), timeout=_CALL) as response:
            if response.status in (401, 403):
                raise InvalidRequest(f"the gateway at {cluster.url} wants an API key: --api-key", param="api_key")
            response.raise_for_status()
            async for _ in response.content.iter_any():
                first_s = first_s or time.monotonic()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"the gateway at {cluster.url} failed a request: {error!r}") from error
    if first_s is None:
        raise Unavailable(f"the gateway at {cluster.url} gave no answer")
    return first_s - sent_s
