"""A soak: streams, clients that leave, look-ups and a kill a minute, for as long as wanted."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from benchmarks.chaos_parts.load import Load, run_load
from benchmarks.chaos_parts.samples import Sample, follow
from benchmarks.chaos_parts.system import System, running_system
from benchmarks.gateway.disconnects import disconnect, random_case

_ARGUMENTS = (
    *("--prefill", "2", "--decode", "2", "--gateways", "2", "--stores", "2"),
    *("--kv-memory", "192MiB", "--dram-bytes", "96MiB", "--disk-bytes", "256MiB"),
)
_NUM_WORKERS = 4
_KILLED = ("decode", "prefill", "gateway", "kvstore")  # in turns, always the youngest: the oldest lives throughout
_KILL_EVERY_S = 60.0
_SAMPLE_EVERY_S = 5.0
_LOOKS = ("/metrics", "/health", "/halfmoon/v1/cluster", "/halfmoon/v1/requests", "/halfmoon/v1/series?minutes=5")


@dataclass(slots=True)
class Soak:
    """What a soak counted and sampled."""

    samples: list[Sample] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)


async def soak(minutes: float, folder: Path) -> Soak:
    """Runs the soak and then waits until all is idle; the last samples are of that."""
    result = Soak()
    end_s = time.monotonic() + 60 * minutes
    async with running_system(_ARGUMENTS, folder / "soak", _NUM_WORKERS, {}) as system:
        sampling = asyncio.ensure_future(follow(system, _SAMPLE_EVERY_S, result.samples))
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(_stream(system, number, end_s, result))
            group.create_task(_leave(system, end_s, result))
            group.create_task(_look(system, end_s, result))
            group.create_task(_kill(system, end_s, result))
        result.ended["whole again at the end"] = await system.until_whole(120)
        await asyncio.sleep(2 * _SAMPLE_EVERY_S)
        result.ended["blocks used at the end"] = await system.used_blocks()
        sampling.cancel()
        result.ended.update({f"{name} lines": count for name, count in system.count_lines({}).items()})
        result.ended.update(_errors(system))
    return result


async def _stream(system: System, number: int, end_s: float, result: Soak) -> None:
    """Streams of many lengths, one in three without a salt, by clients that repeat what broke."""
    rng = random.Random(number)
    while time.monotonic() < end_s:
        salt = "" if rng.random() < 0.33 else f"soak-{number}-{rng.randrange(1 << 30)}"
        shape = replace(Load(), num_clients=2, num_streams=2, num_tokens=rng.randrange(8, 120))
        load = replace(shape, num_words=rng.randrange(10, 400), salt=salt, seed=rng.randrange(50), repeats=True)
        for stream in await run_load(system.url, load):
            state = "lost" if stream.error else "repeated and whole" if stream.num_repeats else "whole"
            result.ended[f"streams {state}"] += 1
            if stream.error:
                result.ended[f"lost: {stream.error[:60]}"] += 1


async def _leave(system: System, end_s: float, result: Soak) -> None:
    rng = random.Random(1)
    while time.monotonic() < end_s:
        with suppress(OSError, ExceptionGroup):
            kinds = await disconnect(
                system.url, lambda own: random_case(own, "demo", 30), 4, 1.0, rng.randrange(1 << 30)
            )
            result.ended["clients left"] += kinds.total()
        await asyncio.sleep(2.0)


async def _look(system: System, end_s: float, result: Soak) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while time.monotonic() < end_s:
            for path in _LOOKS:
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(system.url + path) as response:
                        await response.read()
                        result.ended["look-ups"] += 1
            await asyncio.sleep(1.0)


async def _kill(system: System, end_s: float, result: Soak) -> None:
    turn = 0
    while time.monotonic() + _KILL_EVERY_S < end_s:
        await asyncio.sleep(_KILL_EVERY_S)
        role = _KILLED[turn % len(_KILLED)]
        turn += 1
        ones = system.processes().get(role, [])
        if len(ones) > 1:
            ones[-1].kill()
            result.kills[role] += 1


def _errors(system: System) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in system.log_lines({}):
        if '"level": "ERROR"' in line:
            with suppress(ValueError):
                event = json.loads(line)
                found[f"ERROR {event.get('service')}: {event.get('event')}"[:90]] += 1
    return found
