"""CPU time that serving takes, by service: what is spent beside the engine's steps, and when.

    python -m benchmarks.serving_cost [--layout both|1p1d] [--repeat 3] [--options="--quantization none"]

One `halfmoon up`, started here, with the load of `benchmarks.serving`: one prompt, one long answer, 24 prompts at once.
Milliseconds on a core by the scheduler's count of each thread, so that a busy machine changes them little. *meanwhile*
is from the first request to the last token, *after* in the seconds of `--settle-s` behind it; both are less what the
service takes while nothing runs. Of a worker, the busiest threads, one for each core, count as its *engine*.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil

from benchmarks.live_system import running_system
from benchmarks.serving import Client, Server

_LAYOUTS = {"both": ("--both", "1"), "1p1d": ("--prefill", "1", "--decode", "1")}
_SERVICES = {
    "services.gateway": "gateway",
    "services.kvstore": "store",
    "services.planner": "planner",
    "services.prefill": "prefill worker",
    "services.decode": "decode worker",
}
_IDLE_S = 10.0


class Thread(NamedTuple):
    """A thread of one of the services."""

    service: str
    pid: int
    tid: int


Used = dict[Thread, float]  # milliseconds on a core


def used_ms() -> Used:
    """What every thread has used so far, of the services that this process has started."""
    used: Used = {}
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
            service = next((name for module, name in _SERVICES.items() if module in words), None)
            if service is None:
                continue
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                used[Thread(service, process.pid, int(task.name))] = nanoseconds / 1e6
        except (psutil.Error, OSError):  # it has just ended
            continue
    return used


def by_service(used: Used) -> dict[str, float]:
    """Milliseconds by service, those of workers in two parts."""
    sums: dict[str, float] = {}
    num_of_engine: Counter[str] = Counter()  # threads taken for the engine's, so far
    for thread, spent_ms in sorted(used.items(), key=lambda one: -one[1]):
        name = thread.service
        if name.endswith("worker"):
            num_of_engine[name] += 1
            name += " engine" if num_of_engine[thread.service] <= (os.cpu_count() or 1) else " else"
        sums[name] = sums.get(name, 0.0) + spent_ms
    return sums


class Scenario(NamedTuple):
    """A load, and how many units of it (requests, tokens) the figures are divided by."""

    title: str
    run: Callable[[Client], Awaitable[object]]
    num_units: int


def _scenarios(num_at_once: int) -> list[Scenario]:
    def together(client: Client) -> Awaitable[object]:
        return asyncio.gather(*(client.stream(client.prompt(512), 64) for _ in range(num_at_once)))

    return [
        Scenario("a prompt of 512, its first token", lambda client: client.stream(client.prompt(512), 1), 1),
        Scenario("a token, alone", lambda client: client.stream(client.prompt(16), 256), 256),
        Scenario(f"{num_at_once} of 512 at once, 64 tokens each: a request", together, num_at_once),
    ]


async def _spent(work: Awaitable[object]) -> tuple[dict[str, float], float]:
    """Milliseconds by service while `work` ran, and its seconds."""
    before, began_s = used_ms(), time.monotonic()
    await work
    seconds, after = time.monotonic() - began_s, used_ms()
    return by_service({thread: spent_ms - before.get(thread, 0.0) for thread, spent_ms in after.items()}), seconds


async def measure(url: str, repeat: int, settle_s: float, num_at_once: int) -> None:
    """Measures one running system and prints."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(Server("system", url, "demo"), session)
        client.rng.seed(time.time_ns())
        await client.stream(client.prompt(16), 4)
        await asyncio.sleep(settle_s)
        spent, seconds = await _spent(asyncio.sleep(_IDLE_S))
        idle = {name: value / seconds for name, value in spent.items()}
        print(f"{'CPU ms':54}" + "".join(f"{name:>24}" for name in sorted(idle)))
        _line("a second without work", idle, idle)
        for scenario in _scenarios(num_at_once):
            rows: dict[str, list[dict[str, float]]] = {"meanwhile": [], "after": []}
            took_s = []
            for _ in range(repeat):
                for title, work in (("meanwhile", scenario.run(client)), ("after", asyncio.sleep(settle_s))):
                    spent, seconds = await _spent(work)
                    less_idle = {name: spent.get(name, 0.0) - seconds * idle[name] for name in idle}
                    rows[title].append({name: value / scenario.num_units for name, value in less_idle.items()})
                    took_s += [seconds] if title == "meanwhile" else []
            print(f"{scenario.title} ({statistics.median(took_s):.2f} s in all)")
            for title, measured in rows.items():
                _line(f"  {title}", {name: statistics.median(row[name] for row in measured) for name in idle}, idle)


def _line(title: str, values: dict[str, float], columns: dict[str, float]) -> None:
    print(f"{title:54}" + "".join(f"{values[name]:24.2f}" for name in sorted(columns)), flush=True)


async def run(arguments: argparse.Namespace, state: Path) -> None:
    """Starts the system and measures it."""
    options = (*_LAYOUTS[arguments.layout], "--dtype", "bfloat16", *arguments.options.split())
    async with running_system(options, state, len(_LAYOUTS[arguments.layout]) // 2) as url:
        await measure(url, arguments.repeat, arguments.settle_s, arguments.at_once)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=_LAYOUTS, default="both")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=12.0)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--options", default="", help="further options of `halfmoon up`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfmoon-cost-") as directory:
        asyncio.run(run(arguments, Path(directory)))


if __name__ == "__main__":
    main()
