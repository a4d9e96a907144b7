"""What requests take beside their work on the workers: HTTP, placement, calls, the way of their tokens."""

from __future__ import annotations

from statistics import mean, median
from typing import NamedTuple

import aiohttp

from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.served_request import served
from halfmoon.profiling.target import Cluster

_PROMPT_TOKENS = 16  # few: the difference of two prompts is looked for
_STEPS = 16
_REPEATS = 13


class RequestTime(NamedTuple):
    """Medians, never below 0."""

    request_s: float  # until its prompt is with a prefill worker
    answer_s: float  # from the computed prompt to the token at the client
    token_s: float  # what each decode step takes more than one that is measured at the worker


async def measured_request_time(
    session: aiohttp.ClientSession, cluster: Cluster, prefill: WorkerProbe, decode: WorkerProbe
) -> RequestTime:
    """Requests to the gateway, each followed by the same work asked of the workers themselves.

    What the worker's own answer takes is the way back, the rest of the TTFT the way there. Raises what `served` raises.
    """
    ways_s, answers_s, tokens_s = [], [], []
    for _ in range(_REPEATS):
        async with served(session, cluster, prefill.prompt(_PROMPT_TOKENS), _STEPS + 2) as request:
            came_s = await request.whole()
        alone = await prefill.prefill(prefill.prompt(_PROMPT_TOKENS))
        steps = await decode.decode(1, _PROMPT_TOKENS, _STEPS)
        ways_s.append(request.ttft_s - alone.seconds - alone.answer_s)
        answers_s.append(alone.answer_s)
        step_s = (came_s[-1] - came_s[1]) / (len(came_s) - 2)  # after the hand-over
        tokens_s.append(step_s - mean(step.seconds for step in steps))
    return RequestTime(*(max(median(some[1:]), 0.0) for some in (ways_s, answers_s, tokens_s)))
