"""Streams whose decode worker is killed, with and without direct restore: their longest gap and what it costs.

Two systems run side by side, one with `--conditional-disaggregation off`; they take turns. In each turn a few streams
begin together, all of other prompts, and one of the decode workers that serve them is killed; it is started again. With
`--busy-s` prompts that nobody has cached keep the prefill worker busy meanwhile. Links and stores are limited.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.chat_turns import WORDS, TimedAnswer, question, timed_answer
from benchmarks.live_system import running_system

_MODES = ("off", "failover")
_LIMITS = [f"HALFMOON_{role}_KV_{link}_MBPS" for role in ("PREFILL", "DECODE") for link in ("LINK", "STORE")]
_BUSY_WORDS = 700
_KILLED_AFTER_S = (0.2, 1.0)  # of half of the streams having begun
_POLL_S = 0.1
_REPORT_S = 1.1  # workers report every second


@dataclass(frozen=True, slots=True)
class Load:
    """What each turn asks."""

    num_streams: int
    prompt_words: int
    answer_tokens: int
    busy_s: float  # mean time between other prompts; 0: none


@dataclass(slots=True)
class Measured:
    """The streams of one mode that were moved."""

    longest_gaps_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)  # computed by prefill workers after the kill, by turn
    num_direct: int = 0
    num_same: int = 0  # answers that an undisturbed repeat gave, too
    num_lost: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class _System:
    """One running system of one mode, and its measurements."""

    def __init__(self, http: aiohttp.ClientSession, model: str, rng: random.Random) -> None:
        self.http = http
        self.model = model
        self.rng = rng
        self.measured = Measured()

    async def get(self, path: str) -> Any:
        """A JSON value of the control API."""
        async with self.http.get(f"/halfmoon/v1/{path}") as response:
            return await response.json()

    async def ask(self, content: dict[str, str], num_tokens: int) -> TimedAnswer:
        """One streamed answer."""
        return await timed_answer(self.http, self.model, [content], num_tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this measurement, and what runs it."""
    parser.add_argument("--kills", type=int, default=8, help="of each mode at each speed")
    parser.add_argument("--streams", type=int, default=3, help="that begin together")
    parser.add_argument("--words", type=int, default=300, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=250, help="of an answer")
    parser.add_argument("--busy-s", type=float, default=0.0, help="mean time between other prompts; 0: none")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--mbps", type=float, nargs="+", default=[50, 200, 1000], help="of all links")
    parser.set_defaults(run=_from_arguments)


async def _from_arguments(options: argparse.Namespace) -> None:
    load = Load(options.streams, options.words, options.tokens, options.busy_s)
    for mbps in options.mbps:
        await show(load, mbps, options.prefill, options.decode, options.kills)


async def show(load: Load, mbps: float, num_prefill: int, num_decode: int, num_kills: int) -> None:
    """Prints a line for each mode."""
    os.environ.update(dict.fromkeys(_LIMITS, str(mbps)))
    workers = ("--prefill", str(num_prefill), "--decode", str(num_decode), "--dtype", "float32")
    async with AsyncExitStack() as stack:
        systems = {}
        for mode in _MODES:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            arguments = (*workers, "--conditional-disaggregation", mode)
            url = await stack.enter_async_context(running_system(arguments, directory, num_prefill + num_decode))
            http = await stack.enter_async_context(aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(None)))
            async with http.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            systems[mode] = _System(http, model, random.Random(1))
            for number in range(2 * num_decode):  # shows how fast workers and links are
                await systems[mode].ask(question(1000 + number, 0, load.prompt_words), 30)
        try:
            for turn in range(num_kills):
                for mode in _MODES if turn % 2 else _MODES[::-1]:
                    await _turn(systems[mode], load, turn, num_prefill + num_decode)
        finally:  # an interrupted run shows what it has
            busy = f"other prompts every {load.busy_s:g} s" if load.busy_s else "no other prompts"
            print(
                f"\n{num_kills} kills each at {mbps:g} MB/s, {num_prefill}+{num_decode} workers, {load.num_streams} "
                f"streams of {load.prompt_words} words and {load.answer_tokens} tokens, {busy}"
            )
            columns = ("moved", "direct", "gap p50", "mean", "p90", "max s", "e2e s", "prefilled", "same", "lost")
            print(f"{'mode':10}" + "".join(f"{column:>10}" for column in columns))
            for mode, system in systems.items():
                _print(mode, system.measured)


def _print(mode: str, found: Measured) -> None:
    gaps_s = found.longest_gaps_s or [float("nan")]
    figures = [*np.percentile(gaps_s, 50, keepdims=True), np.mean(gaps_s), np.percentile(gaps_s, 90), max(gaps_s)]
    figures.append(np.mean(found.e2e_s or [float("nan")]))
    counts = f"{np.mean(found.prefill_tokens or [0]):10.0f}{found.num_same:10}{found.num_lost:10}"
    reasons = ", ".join(f"{reason} {number}" for reason, number in found.reasons.items())
    moved = f"{mode:10}{len(found.e2e_s):10}{found.num_direct:10}"
    print(moved + "".join(f"{value:10.3f}" for value in figures) + counts + f"  {reasons}", flush=True)


async def _turn(system: _System, load: Load, turn: int, num_workers: int) -> None:
    """Begins streams, kills one of the decode workers that serve them, and notes what became of its streams."""
    prompts = [question(turn * load.num_streams + n + 1, turn, load.prompt_words) for n in range(load.num_streams)]
    others = asyncio.create_task(_other_prompts(system, load.busy_s, turn)) if load.busy_s else None
    before = await _disaggregation(system)
    streams = [asyncio.create_task(system.ask(prompt, load.answer_tokens)) for prompt in prompts]
    try:
        victim = await _victim(system, load.num_streams)
        await asyncio.sleep(system.rng.uniform(*_KILLED_AFTER_S))
        computed = await _prefill_tokens(system)
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.gather(*streams, return_exceptions=True)
    finally:
        if others is not None:
            others.cancel()
            await asyncio.wait({others})
    found = system.measured
    await asyncio.sleep(_REPORT_S)
    found.reasons += (await _disaggregation(system)) - before
    found.prefill_tokens.append(await _prefill_tokens(system) - computed)
    moves = {one["request_id"]: one["moves"] for one in await system.get("placements?limit=100")}
    for prompt, answer in zip(prompts, answers, strict=True):
        if isinstance(answer, BaseException):
            found.num_lost += 1
        elif moved := moves[answer.request_id]:
            found.longest_gaps_s.append(max(map(sub, answer.times_s[1:], answer.times_s)))
            found.e2e_s.append(answer.times_s[-1])
            found.num_direct += moved[-1]["prefill_worker"] == moved[-1]["decode_worker"]
            found.num_same += (await system.ask(prompt, load.answer_tokens)).text == answer.text
    while len((await system.get("cluster"))["workers"]) < num_workers:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(_POLL_S)


async def _victim(system: _System, num_streams: int) -> int:
    """Process id of the decode worker with most of the streams, once half of them decode."""
    while True:
        workers = (await system.get("cluster"))["workers"]
        running = Counter({int(one["pid"]): one["load"]["num_running"] for one in workers if one["role"] == "decode"})
        if 2 * running.total() >= num_streams:
            return running.most_common(1)[0][0]
        await asyncio.sleep(_POLL_S)


async def _prefill_tokens(system: _System) -> int:
    """Tokens that prefill workers have computed, as they reported it in the last second."""
    workers = (await system.get("cluster"))["workers"]
    return sum(int(one["load"]["num_prefill_tokens_total"]) for one in workers if one["role"] == "prefill")


async def _disaggregation(system: _System) -> Counter[str]:
    """Failovers by why they stayed on a decode worker, or did not."""
    async with system.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = Counter[str]()
    for line in lines:
        if line.startswith('halfmoon_gateway_pool_decisions_total{decision="direct_restore"'):
            counts[line.split('reason="')[1].split('"')[0]] = int(float(line.split()[-1]))
    return counts


async def _other_prompts(system: _System, every_s: float, turn: int) -> None:
    async with asyncio.TaskGroup() as group:
        number = 0
        while True:
            words = [WORDS[system.rng.randrange(len(WORDS))] for _ in range(_BUSY_WORDS)]
            content = {"role": "user", "content": f"Other prompt {turn} {number}: {' '.join(words)}"}
            group.create_task(system.ask(content, 1))
            await asyncio.sleep(system.rng.expovariate(1 / every_s))
            number += 1
