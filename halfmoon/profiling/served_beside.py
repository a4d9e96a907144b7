"""How much prompts and answers slow each other down as they are served: gateway and client use the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp

from halfmoon.profiling.measuring import Progress, usual_mean
from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.request_time import RequestTime
from halfmoon.profiling.served_request import served
from halfmoon.profiling.target import Cluster
from halfmoon.sim.profile import MeasuredSlowdown

_PROMPT_TOKENS, _SHORT_TOKENS = 256, 64
_ANSWERS = 2
_STEPS = 16
_MOST_TOKENS = 1_024  # of an answer that is given up before
_ROUNDS = 7


async def served_slowdowns(
    session: aiohttp.ClientSession,
    cluster: Cluster,
    probe: WorkerProbe,
    beside_work: RequestTime,
    on_progress: Progress,
) -> list[MeasuredSlowdown]:
    """Of prompts beside answers, and of answers beside a prompt, on a prefill and a decode worker; means of rounds.

    What is too short to be told from the rest of a request is left out. Raises what `served` raises.
    """
    alone_s, busy_s, of_answers = [], [], []
    prompt_tokens = min(_PROMPT_TOKENS, probe.target.context_tokens // 2)
    most_tokens = min(_MOST_TOKENS, probe.target.context_tokens - _SHORT_TOKENS)
    for done in range(_ROUNDS):
        on_progress("side by side", done, _ROUNDS)
        async with served(session, cluster, probe.prompt(prompt_tokens), 1) as alone:
            await alone.events(1)
        async with AsyncExitStack() as answers:
            others = [
                await answers.enter_async_context(served(session, cluster, probe.prompt(_SHORT_TOKENS), most_tokens))
                for _ in range(_ANSWERS)
            ]
            before = [len(await one.events(2)) for one in others]  # after the hand-over
            first = others[0]
            await first.events(before[0] + _STEPS)
            num_alone = len(first.came_s)
            async with served(session, cluster, probe.prompt(prompt_tokens), 1) as prompt:
                await prompt.events(1)
            came_s = await first.events(num_alone + 1)
        alone_s.append(alone.ttft_s)
        busy_s.append(prompt.ttft_s)
        meanwhile = [at_s for at_s in came_s if prompt.sent_s + beside_work.request_s <= at_s <= prompt.came_s[0]]
        if len(meanwhile) > 2:
            of_answers.append(_gap_s(meanwhile) / _gap_s(came_s[before[0] - 1 : num_alone]))
    on_progress("side by side", _ROUNDS, _ROUNDS)
    found = []
    beside_s = beside_work.request_s + beside_work.answer_s
    prompt_s, busy_prompt_s = usual_mean(alone_s) - beside_s, usual_mean(busy_s) - beside_s
    if min(prompt_s, busy_prompt_s) > 0:
        found.append(MeasuredSlowdown(work="prefill", neighbour="decode", slowdown=busy_prompt_s / prompt_s))
    if of_answers:
        found.append(MeasuredSlowdown(work="decode", neighbour="prefill", slowdown=usual_mean(of_answers)))
    return found


def _gap_s(times_s: Sequence[float]) -> float:
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)
