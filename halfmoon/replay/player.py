"""Plays a workload: every request at its time, regardless of earlier ones (an open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from halfmoon.replay.client import Gateway, ReplayRequest, send
from halfmoon.replay.outcome import Outcome
from halfmoon.replay.prompts import Prompts
from halfmoon.sim.workloads.workload import Workload

_LEAD_S = 0.2  # before the first request


async def played(
    workload: Workload, gateway: Gateway, on_done: Callable[[], None], first_request: int = 0
) -> list[Outcome]:
    """The outcome of each request; `on_done` is called at each end. The trace's second `t` is at `t / speed`.

    Workloads whose requests count from different `first_request`s on have no own tokens in common.
    """
    prompts = Prompts(workload, first_request)
    most = int(workload.output_tokens.max(initial=1))
    outcomes: list[Outcome | None] = [None] * len(workload)
    started_s = time.monotonic() + _LEAD_S

    async def one(session: aiohttp.ClientSession, index: int, due_s: float) -> None:
        request = ReplayRequest(prompts.of(index).tolist(), int(workload.output_tokens[index]), most, due_s)
        outcomes[index] = await send(session, gateway, request)
        on_done()

    connector = aiohttp.TCPConnector(limit=0, ssl=gateway.trusted or True)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as requests:
        for index, start_s in enumerate((workload.start_s - workload.start_s[:1]).tolist()):
            due_s = started_s + start_s / gateway.speed
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            requests.create_task(one(session, index, due_s))
    return [outcome for outcome in outcomes if outcome is not None]
