"""Measures how much slower a worker is while another one of its host computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from statistics import mean
from typing import TypeVar

from halfmoon.errors import NoCapacity
from halfmoon.profiling.measuring import Progress, trimmed_mean
from halfmoon.profiling.probe import Prefilled, WorkerProbe
from halfmoon.sim.cluster.contention import Work
from halfmoon.sim.latency_sources.measured_profile import MeasuredSlowdown

_PROMPT_TOKENS = 256
_PROMPTS = 3
_BATCH = 4
_CONTEXT_TOKENS = 256
_STEPS = 16
_ROUNDS = 5
_PAUSE_S = 0.01
_TRIES = 500
_WORKS: tuple[Work, Work] = ("prefill", "decode")

Measured = TypeVar("Measured")


async def measured_slowdowns(probe: WorkerProbe, other: WorkerProbe, on_progress: Progress) -> list[MeasuredSlowdown]:
    """Measures each pair of works that both workers can do concurrently, alternating between alone and side by side.

    The workers serve no requests meanwhile. See `served_slowdowns` for workers that all share one host.
    """
    pairs = [
        (mine, its, neighbour, work)
        for mine, neighbour in ((probe, other), (other, probe))
        for its in _WORKS
        for work in _WORKS
        if mine.target.can(work) and neighbour.target.can(its)
    ]
    pairs = list({(work, its): (mine, its, neighbour, work) for mine, its, neighbour, work in pairs}.values())
    result = []
    for number, (mine, its, neighbour, work) in enumerate(pairs):
        alone_s: list[float] = []
        beside_s: list[float] = []
        for done in range(_ROUNDS):
            on_progress("side by side", number * _ROUNDS + done, len(pairs) * _ROUNDS)
            alone_s.append(await _mean_s(mine, work, neighbour))
            async with _busy(neighbour, its, mine):
                beside_s.append(await _mean_s(mine, work, neighbour))
        result.append(
            MeasuredSlowdown(work=work, neighbour=its, slowdown=trimmed_mean(beside_s) / trimmed_mean(alone_s))
        )
    on_progress("side by side", len(pairs) * _ROUNDS, len(pairs) * _ROUNDS)
    return result


async def _mean_s(probe: WorkerProbe, work: Work, other: WorkerProbe) -> float:
    """Mean time of a few prompts, which are handed over, or of a few steps."""
    if work == "prefill":
        async with probe.handing_over(other) as receiver:
            return mean([(await _prompt(probe, receiver)).seconds for _ in range(_PROMPTS)])
    steps = await _with_room(lambda: probe.decode(_BATCH, _context_tokens(probe), _STEPS))
    return mean(step.seconds for step in steps)


@asynccontextmanager
async def _busy(probe: WorkerProbe, work: Work, other: WorkerProbe) -> AsyncIterator[None]:
    """Keeps the worker busy inside the block. Raises what ends its work.

    A prefill worker hands its prompts over to the other one, as it does in service, which costs both of them time.
    """
    if work == "decode":
        async with probe.decoding(_BATCH, _context_tokens(probe)) as watch:
            await watch.steps(1)
            yield
        return
    begun = asyncio.Event()
    async with probe.handing_over(other) as receiver, asyncio.TaskGroup() as group:
        # one waits while the other is computed
        tasks = [group.create_task(_prompt_after_prompt(probe, receiver, begun)) for _ in range(2)]
        await begun.wait()
        yield
        for task in tasks:
            task.cancel()


async def _prompt_after_prompt(probe: WorkerProbe, receiver: WorkerProbe | None, begun: asyncio.Event) -> None:
    while True:
        await _prompt(probe, receiver)
        begun.set()


async def _prompt(probe: WorkerProbe, receiver: WorkerProbe | None) -> Prefilled:
    num_tokens = min(_PROMPT_TOKENS, probe.target.context_tokens // 2)
    return await _with_room(lambda: probe.prefill(probe.prompt(num_tokens), receiver))


async def _with_room(call: Callable[[], Awaitable[Measured]]) -> Measured:
    """The call's result, once there is room. Each prompt leaves the receiver a step to do, so it may fall behind.

    Raises NoCapacity if that lasts.
    """
    for _ in range(_TRIES):
        with suppress(NoCapacity):
            return await call()
        await asyncio.sleep(_PAUSE_S)
    return await call()


def _context_tokens(probe: WorkerProbe) -> int:
    return min(_CONTEXT_TOKENS, probe.target.context_tokens // 4)
