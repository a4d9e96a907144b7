"""Plays a workload: every request at its time, regardless of earlier ones (an open loop), or sessions turn by turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

import aiohttp

from halfmoon.replay.client import Gateway, ReplayRequest, send, user_message
from halfmoon.replay.outcome import Outcome
from halfmoon.replay.prompts import Prompts, own_tokens
from halfmoon.replay.sessions import Session
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

    async with _connections(gateway) as session, asyncio.TaskGroup() as requests:
        for index, start_s in enumerate((workload.start_s - workload.start_s[:1]).tolist()):
            due_s = started_s + start_s / gateway.speed
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            requests.create_task(one(session, index, due_s))
    return [outcome for outcome in outcomes if outcome is not None]


async def played_sessions(
    sessions: Sequence[Session], gateway: Gateway, first_request: int = 0, num_at_once: int | None = None
) -> list[list[Outcome]]:
    """The outcomes of each session's turns, up to the first one that was not answered.

    Sessions begin at their times, or with `num_at_once` as soon as fewer than so many run (a closed loop). They are
    chats; a session of one turn is sent as the gateway is asked.
    """
    outcomes: list[list[Outcome]] = [[] for _ in sessions]
    started_s = time.monotonic() + _LEAD_S
    waiting = iter(range(len(sessions)))
    first_turns = list(accumulate((len(session.turns) for session in sessions), initial=first_request))

    async def one(http: aiohttp.ClientSession, index: int, due_s: float) -> None:
        history: list[dict[str, str]] | None = None if len(sessions[index].turns) == 1 else []
        for turn in sessions[index].turns:
            if outcomes[index]:
                due_s = time.monotonic() + turn.delay_s
                await asyncio.sleep(turn.delay_s)
            tokens = own_tokens(first_turns[index] + len(outcomes[index]), turn.prompt_tokens).tolist()
            request = ReplayRequest(
                tokens, turn.output_tokens, turn.output_tokens, due_s, None if history is None else tuple(history)
            )
            outcome = await send(http, gateway, request)
            outcomes[index].append(outcome)
            if outcome.end != "answered":
                return
            if history is not None:
                history += [user_message(tokens), {"role": "assistant", "content": outcome.text}]

    async def agent(http: aiohttp.ClientSession) -> None:
        for index in waiting:
            await one(http, index, time.monotonic())

    async with _connections(gateway) as http, asyncio.TaskGroup() as tasks:
        if num_at_once is not None:
            for _ in range(num_at_once):
                tasks.create_task(agent(http))
        else:
            for index, session in enumerate(sessions):
                due_s = started_s + session.start_s
                await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
                tasks.create_task(one(http, index, due_s))
    return outcomes


@asynccontextmanager
async def _connections(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, ssl=gateway.trusted or True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session
