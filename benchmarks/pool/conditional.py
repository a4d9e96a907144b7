"""Chats of several turns with and without conditional disaggregation: TTFT, gaps between tokens, and who computed.

Chats run side by side with pauses between their turns, each turn with the whole conversation so far; meanwhile long
prompts come that nobody has cached. Modes take turns, each in a system of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.chat_turns import WORDS, question, timed_answer
from benchmarks.live_system import running_system

_COUNT = re.compile(r'halfmoon_gateway_pool_decisions_total\{decision="disaggregation",reason="(\w+)"\} ([0-9.]+)')


@dataclass(frozen=True, slots=True)
class Load:
    """The chats of one system, and the long prompts beside them."""

    num_chats: int
    num_turns: int
    first_words: int = 300  # of a question
    later_words: int = 30
    answer_tokens: int = 64
    think_s: float = 1.0  # mean pause before a turn
    long_words: int = 1500
    long_every_s: float = 4.0


@dataclass(slots=True)
class Measured:
    """What the answers of one mode took, over all its systems."""

    first_ttfts_s: list[float] = field(default_factory=list)  # of first turns
    ttfts_s: list[float] = field(default_factory=list)  # of later turns
    long_ttfts_s: list[float] = field(default_factory=list)
    first_gaps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    reasons: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    texts: dict[tuple[int, int], str] = field(default_factory=dict)  # by chat and turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this measurement, and what runs it."""
    parser.add_argument("--chats", type=int, default=4, help="side by side")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--rounds", type=int, default=2, help="systems of each mode")
    parser.add_argument("--modes", nargs="+", default=["off", "auto", "strict"])
    parser.add_argument("--engine", choices=("real", "sim"), default="real")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--long-every-s", type=float, default=4.0, help="mean time between long prompts")
    parser.set_defaults(run=_from_arguments)


async def _from_arguments(options: argparse.Namespace) -> None:
    load = Load(options.chats, options.turns, long_every_s=options.long_every_s)
    counts = ("--prefill", str(options.prefill), "--decode", str(options.decode))
    workers = (*counts, "--set", f"engine={options.engine}", "--dtype", options.dtype)
    await show(load, options.modes, workers, options.prefill + options.decode, options.rounds)


async def show(load: Load, modes: Sequence[str], workers: Sequence[str], num_workers: int, num_rounds: int) -> None:
    """Prints one line for each mode."""
    measured = {mode: Measured() for mode in modes}
    for _ in range(num_rounds):
        for mode in modes:
            arguments = (*workers, "--conditional-disaggregation", mode)
            with tempfile.TemporaryDirectory() as directory:
                async with (
                    running_system(arguments, Path(directory), num_workers) as url,
                    aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(None)) as http,
                ):
                    await _run(http, load, measured[mode])
    print(f"{load.num_chats} chats of {load.num_turns} turns, {num_rounds} times, {' '.join(workers)}; times in ms")
    columns = ("TTFT 1", "TTFT 2+", "p90", "long", "1st gap", "p90", "TBT", "p50", "p99")
    print(f"{'mode':8}" + "".join(f"{column:>9}" for column in columns) + "  placements")
    for mode, found in measured.items():
        figures = [np.mean(found.first_ttfts_s), np.mean(found.ttfts_s), np.percentile(found.ttfts_s, 90)]
        figures += [np.mean(found.long_ttfts_s), np.mean(found.first_gaps_s), np.percentile(found.first_gaps_s, 90)]
        figures += [np.mean(found.gaps_s), np.percentile(found.gaps_s, 50), np.percentile(found.gaps_s, 99)]
        reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in found.reasons.items() if count)
        print(f"{mode:8}" + "".join(f"{1e3 * value:9.1f}" for value in figures) + f"  {reasons}", flush=True)
    first, *others = measured.values()
    shared = [first.texts.keys() & other.texts.keys() for other in others]
    same = [
        sum(first.texts[key] == other.texts[key] for key in keys) for keys, other in zip(shared, others, strict=True)
    ]
    print(
        "answers equal to the first mode's: " + ", ".join(f"{a} of {len(b)}" for a, b in zip(same, shared, strict=True))
    )


async def _run(http: aiohttp.ClientSession, load: Load, found: Measured) -> None:
    async with http.get("/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    await _chat(http, model, -1, load, Measured())  # warms up, and shows how fast each kind of worker is
    rng = random.Random(1)
    before = await _reasons(http)
    long_prompts = asyncio.create_task(_long_prompts(http, model, load, found))
    try:
        await asyncio.gather(*(_chat(http, model, n, load, found, rng) for n in range(load.num_chats)))
    finally:
        long_prompts.cancel()
        await asyncio.wait({long_prompts})
    for reason, count in (await _reasons(http)).items():
        found.reasons[reason] += count - before[reason]


async def _chat(
    http: aiohttp.ClientSession, model: str, number: int, load: Load, found: Measured, rng: random.Random | None = None
) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(load.num_turns if rng else 3):
        if rng is not None:
            await asyncio.sleep(rng.expovariate(1 / load.think_s))
        num_words = load.later_words if turn else load.first_words
        messages.append(question(number, turn, num_words))
        _, times_s, text = await timed_answer(http, model, messages, load.answer_tokens)
        messages.append({"role": "assistant", "content": text})
        (found.ttfts_s if turn else found.first_ttfts_s).append(times_s[0])
        gaps_s = np.diff(times_s).tolist()
        found.first_gaps_s.append(gaps_s[0])
        found.gaps_s += gaps_s[1:]
        found.texts[number, turn] = text


async def _long_prompts(http: aiohttp.ClientSession, model: str, load: Load, found: Measured) -> None:
    rng = random.Random(2)
    async with asyncio.TaskGroup() as group:

        async def send(number: int) -> None:
            words = [WORDS[rng.randrange(len(WORDS))] for _ in range(load.long_words)]
            content = f"Long prompt {number}: {' '.join(words)}"
            answer = await timed_answer(http, model, [{"role": "user", "content": content}], 8)
            found.long_ttfts_s.append(answer.times_s[0])

        number = 0
        while True:
            await asyncio.sleep(rng.expovariate(1 / load.long_every_s))
            number += 1
            group.create_task(send(number))


async def _reasons(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        return {reason: float(count) for reason, count in _COUNT.findall(await response.text())}
