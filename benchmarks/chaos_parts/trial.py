"""One trial: load, a fault in its middle, and what came of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.chaos_parts.fault import Fault
from benchmarks.chaos_parts.load import Load, Stream, run_load
from benchmarks.chaos_parts.system import System

_LEAK_AFTER_S = 4.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did. Times in seconds; None: did not happen within the trial."""

    fault: str
    num_streams: int = 0
    lost: int = 0
    refused: int = 0
    changed: int = 0
    repeated: int = 0
    longest_pause_s: float = 0.0
    worst_ttft_s: float = 0.0
    missed_after_s: float | None = None
    back_after_s: float | None = None
    leaked_blocks: int | None = None
    warnings: int = 0
    errors: int = 0
    tracebacks: int = 0
    note: str = ""


class Watch:
    """Owns when the workers, or the gateway, were first missed after the fault and when all were there again."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.missed_after_s: float | None = None
        self.back_after_s: float | None = None

    async def follow(self, since_s: float) -> None:
        """Polls for as long as it runs."""
        while True:
            members = await self._system.workers()
            now_s = time.monotonic() - since_s
            if len(members) < self._system.num_workers:
                self.missed_after_s = now_s if self.missed_after_s is None else self.missed_after_s
                self.back_after_s = None
            elif self.missed_after_s is not None and self.back_after_s is None:
                self.back_after_s = now_s
            await asyncio.sleep(_POLL_S)


async def reference_texts(system: System, load: Load) -> list[str]:
    """The texts of an undisturbed run. Raises RuntimeError if even that lost one."""
    streams = await run_load(system.url, load)
    broken = [stream.error for stream in streams if stream.error]
    if broken:
        raise RuntimeError(f"the undisturbed run lost {len(broken)} streams: {broken[0]}")
    return [stream.text for stream in streams]


async def try_fault(system: System, fault: Fault, load: Load, here: Any, texts: Sequence[str]) -> Outcome:
    """Runs the load, does the fault, and waits until the system is whole again."""
    load = replace(load, salt=secrets.token_hex(4) if load.salt else "", repeats=fault.repeats or load.repeats)
    since = system.log_sizes()
    watch = Watch(system)
    run = asyncio.ensure_future(run_load(system.url, load))
    await asyncio.sleep(fault.after_s)
    following = asyncio.ensure_future(watch.follow(time.monotonic()))
    try:
        note = await fault.act(system, here)
        streams = await run
        is_whole = await system.until_whole(fault.whole_within_s)
    finally:
        following.cancel()
        run.cancel()
    leaked: int | None = None
    if is_whole:
        await asyncio.sleep(_LEAK_AFTER_S)
        leaked = await system.used_blocks()
    return _outcome(fault, streams, texts, watch, leaked, system, since, note)


def _outcome(
    fault: Fault,
    streams: Sequence[Stream],
    texts: Sequence[str],
    watch: Watch,
    leaked: int | None,
    system: System,
    since: Any,
    note: str,
) -> Outcome:
    lines = system.count_lines(since)
    whole = [(stream, text) for stream, text in zip(streams, texts, strict=True) if stream.error is None]
    reasons = sorted({str(stream.error) for stream in streams if stream.error})
    return Outcome(
        fault.name,
        len(streams),
        sum(stream.error is not None and not stream.is_refused for stream in streams),
        sum(stream.is_refused for stream in streams),
        sum(stream.text != text for stream, text in whole),
        sum(stream.num_repeats > 0 for stream in streams),
        max(stream.longest_pause_s for stream in streams),
        max(stream.ttft_s for stream in streams),
        watch.missed_after_s,
        watch.back_after_s,
        leaked,
        lines["WARNING"],
        lines["ERROR"],
        lines["traceback"],
        "; ".join(part for part in (note, *reasons[:2]) if part),
    )
