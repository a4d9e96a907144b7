"""Samples of a running system: memory, descriptors, threads and KV blocks of each service, and their trends."""

from __future__ import annotations

import asyncio
import csv
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import psutil

from benchmarks.chaos_parts.system import System

_MIB = 1 << 20
_WARM = 0.33  # share of the time in which caches fill; trends are over the rest
UNITS = {"rss": "MiB", "descriptors": "", "threads": "", "blocks": "", "shm": "MiB"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one service, named by its role and its rank by age: the oldest of a role is 0."""

    t_s: float
    service: str
    pid: int
    quantity: str
    value: float


@dataclass(frozen=True, slots=True)
class Trend:
    """How one figure of one service went after the warm-up."""

    service: str
    quantity: str
    first: float
    last: float
    highest: float
    slope_per_hour: float


async def follow(system: System, every_s: float, samples: list[Sample]) -> None:
    """Appends samples for as long as it runs."""
    began_s = time.monotonic()
    while True:
        now_s = time.monotonic() - began_s
        found = await asyncio.to_thread(_of_processes, system, now_s)
        services = {sample.pid: sample.service for sample in found}
        samples += found
        for worker in await system.workers():
            pid, used = worker["pid"], worker["total_blocks"] - worker["load"]["free_blocks"]
            if pid in services:
                samples.append(Sample(now_s, services[pid], pid, "blocks", used))
        await asyncio.sleep(every_s)


def _of_processes(system: System, now_s: float) -> list[Sample]:
    found = []
    ranked = [(f"{role}-{rank}", one) for role, ones in system.processes().items() for rank, one in enumerate(ones)]
    for service, process in [*ranked, ("up", psutil.Process(system.process.pid))]:
        with suppress(psutil.NoSuchProcess), process.oneshot():
            found.append(Sample(now_s, service, process.pid, "rss", process.memory_info().rss / _MIB))
            found.append(Sample(now_s, service, process.pid, "descriptors", process.num_fds()))
            found.append(Sample(now_s, service, process.pid, "threads", process.num_threads()))
    files = [os.stat(entry.path).st_size for entry in os.scandir("/dev/shm")]
    found.append(Sample(now_s, "files", 0, "shm", len(files)))
    found.append(Sample(now_s, "size", 0, "shm", sum(files) / _MIB))
    return found


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """A line through each series after the warm-up. Places whose process was killed are left out: they begin again."""
    end_s = max(sample.t_s for sample in samples)
    series: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.t_s >= _WARM * end_s:
            series.setdefault((sample.quantity, sample.service), []).append(sample)
    found = []
    for (quantity, service), ones in sorted(series.items()):
        if len(ones) < 3 or len({one.pid for one in ones}) > 1:
            continue
        values = [one.value for one in ones]
        slope = float(np.polyfit([one.t_s / 3600 for one in ones], values, 1)[0])
        found.append(Trend(service, quantity, values[0], values[-1], max(values), slope))
    return found


def trend_table(found: Iterable[Trend]) -> str:
    """The trends as a Markdown table."""
    rows = [
        f"| {one.quantity} | {one.service} | {one.first:.0f} | {one.last:.0f} | {one.highest:.0f} | "
        f"{one.slope_per_hour:+.1f} {UNITS[one.quantity]} |"
        for one in found
    ]
    head = (
        "| quantity | service | after the warm-up | at the end | highest | slope an hour |",
        "|---|---|---|---|---|---|",
    )
    return "\n".join([*head, *rows]) + "\n"


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    """Writes one line a sample."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Sample))
        writer.writerows(astuple(sample) for sample in samples)
