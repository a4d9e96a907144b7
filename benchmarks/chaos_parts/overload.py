"""Overload: goodput at rising rates, then minutes at ten times the rate that served best. Workers are simulated."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.chaos_parts.samples import Sample, Trend, follow, trends
from benchmarks.chaos_parts.system import System, running_system

_ARGUMENTS = (
    *("--engine", "sim", "--prefill", "1", "--decode", "1", "--slo", "default"),
    *("--set", "gateway.max_connections_per_client=0"),  # one client stands for many
    *("--sim-profile", "llama2-70b-8xa800", "--sim-time-scale", "0.2"),  # slow workers: it is they who are overloaded
)
_TTFT_S, _TBT_S = 8.0, 0.5
_RATES_PER_S = (1.0, 1.5, 2.0, 3.0)
_RATE_S = 60.0
_WINDOW_S = 30.0
_PROMPT_TOKENS, _OUTPUT_TOKENS = range(400, 1_600), range(20, 120)
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: when it was sent, its status, and whether it met the targets (`is_good`)."""

    sent_s: float
    status: int
    is_good: bool


@dataclass(slots=True)
class Overload:
    """Goodput by rate, goodput under overload by window, and the services' memory meanwhile."""

    goodput_by_rate: dict[float, float] = field(default_factory=dict)
    best_rate_per_s: float = 0.0
    windows: list[float] = field(default_factory=list)  # good answers per second
    statuses: Counter[int] = field(default_factory=Counter)
    memory: list[Trend] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


async def overload(minutes: float, folder: Path) -> Overload:
    """Finds the peak of goodput and stays at ten times its rate."""
    result = Overload()
    async with running_system(_ARGUMENTS, folder / "overload", 2, {}) as system:
        await _set_targets(system)
        for rate in _RATES_PER_S:
            result.goodput_by_rate[rate] = _goodput(await _at_rate(system, rate, _RATE_S), _RATE_S)
            await asyncio.sleep(_SETTLE_S)
        result.best_rate_per_s = max(result.goodput_by_rate, key=lambda rate: result.goodput_by_rate[rate])
        sampling = asyncio.ensure_future(follow(system, 2.0, result.samples))
        answers = await _at_rate(system, 10 * result.best_rate_per_s, 60 * minutes)
        sampling.cancel()
    began_s = min(answer.sent_s for answer in answers)
    for number in range(int(60 * minutes / _WINDOW_S)):
        from_s = began_s + number * _WINDOW_S
        window = [answer for answer in answers if from_s <= answer.sent_s < from_s + _WINDOW_S]
        result.windows.append(_goodput(window, _WINDOW_S))
    result.statuses.update(answer.status for answer in answers)
    result.memory = [one for one in trends(result.samples) if one.quantity == "rss"]
    return result


def report(result: Overload) -> str:
    """The result in Markdown."""
    peak = result.goodput_by_rate[result.best_rate_per_s]
    rates = "; ".join(f"{rate:g}/s: {good:.2f}/s" for rate, good in result.goodput_by_rate.items())
    windows = " ".join(f"{window:.2f}" for window in result.windows)
    mean = sum(result.windows) / len(result.windows)
    memory = "; ".join(f"{one.service} {one.first:.0f} to {one.last:.0f} MiB" for one in result.memory)
    return (
        f"Goodput by offered rate: {rates}.\n"
        f"At {10 * result.best_rate_per_s:g}/s: {mean:.2f}/s, {mean / peak:.0%} of the peak; every 30 s: {windows}.\n"
        f"Statuses: {dict(sorted(result.statuses.items()))}. Memory: {memory}.\n"
    )


async def _set_targets(system: System) -> None:
    url = f"{system.url}/halfmoon/v1/classes"
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.get(url) as response:
            versions = {one["name"]: one["version"] for one in (await response.json())["classes"]}
        body = {"ttft_s": _TTFT_S, "tbt_s": _TBT_S, "early_rejection": "strict", "version": versions.get("default", 0)}
        async with session.put(f"{url}/default", json=body):
            return


async def _at_rate(system: System, rate_per_s: float, seconds: float) -> list[Answer]:
    """Sends requests at random times (Poisson), whatever becomes of those before."""
    rng = random.Random(rate_per_s)
    answers: list[Answer] = []
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        began_s = next_s = time.monotonic()
        while next_s < began_s + seconds:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            group.create_task(_ask(session, system.url, random.Random(rng.random()), answers))
            next_s += rng.expovariate(rate_per_s)
    return answers


async def _ask(session: aiohttp.ClientSession, url: str, rng: random.Random, answers: list[Answer]) -> None:
    body = {
        "model": "demo",
        "prompt": [rng.randrange(1_000, 30_000) for _ in range(rng.choice(_PROMPT_TOKENS))],
        "max_tokens": rng.choice(_OUTPUT_TOKENS),
        "ignore_eos": True,
        "stream": True,
    }
    sent_s, arrivals_s, status = time.monotonic(), list[float](), 0
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            status = response.status
            async for line in response.content:
                if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                    arrivals_s.append(time.monotonic())
    except (aiohttp.ClientError, TimeoutError, OSError):
        status = status or -1
    is_good = status == 200 and _meets(sent_s, arrivals_s)
    answers.append(Answer(sent_s, status, is_good))


def _meets(sent_s: float, arrivals_s: Sequence[float]) -> bool:
    if not arrivals_s or arrivals_s[0] - sent_s > _TTFT_S:
        return False
    mean_s = (arrivals_s[-1] - arrivals_s[0]) / max(1, len(arrivals_s) - 1)
    return mean_s <= _TBT_S


def _goodput(answers: Sequence[Answer], seconds: float) -> float:
    return sum(answer.is_good for answer in answers) / seconds
