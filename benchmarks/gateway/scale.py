"""What one gateway and its ledger cost in a cluster of many workers, and what a larger cluster would need.

    python -m benchmarks.gateway.scale [--workers 8 32 128 512 1000] [--rate 20] [--seconds 12] [--tokens 100]
        [--ledger URL] [--index 64 1000] [--target-workers 1000] [--target-rate 1667]

A real gateway, on the last core that this process may use, with as many simulated workers, half of them for prefill, at
the pace of real ones; workers and clients share the other cores. Each step measures:

joined s        from the start of the workers until the gateway counts all of them as members.
idle CPU        of the gateway while nothing is asked: it reads each worker's report every second.
idle KB/s       over loopback then: reports, their acknowledgements, pings.
memory          of the gateway, all workers being members.
CPU ms/request  of the gateway while requests arrive at `--rate`, beyond what it uses while idle.
KB/request      over loopback, beyond what is sent while idle: HTTP, calls to both workers, tokens, block events, KV.
TTFT            of these requests; a simulated prefill takes as long as its profile says.
others CPU      of the other cores, by workers and clients meanwhile: near 100 % they are what is slow.
late            reports: whether any worker was shown as silent.

Then what `benchmarks/gateway/scale_parts.py` measures without a cluster, and what the target would need, on paper.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.gateway.relay import serving
from benchmarks.gateway.scale_parts import Costs, index_cost, ledger_rate, needed
from halfmoon.rpc.server import run_service
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor

_PROMPT_WORDS = 300
_A_PROCESS = 256  # simulated workers in one process
_TIMEOUT_S = 600.0
_HEADER = (
    *("workers", "joined s", "idle CPU %", "idle KB/s", "memory MB", "CPU ms/request", "KB/request"),
    *("TTFT p50 ms", "TTFT p99 ms", "others CPU %", "late", "asked/s"),
)


class Asked(NamedTuple):
    """Requests that each step sends."""

    rate: float
    seconds: float
    num_tokens: int


class Used(NamedTuple):
    """CPU time and bytes over loopback, up to a time."""

    at_s: float
    cpu_s: float  # of the gateway
    others_s: float
    num_bytes: int

    def since(self, start: Used) -> Used:
        """What was used since then."""
        return Used(
            self.at_s - start.at_s,
            self.cpu_s - start.cpu_s,
            self.others_s - start.others_s,
            self.num_bytes - start.num_bytes,
        )


class Target(NamedTuple):
    """A running gateway and its workers."""

    url: str
    process: psutil.Process
    simulations: Sequence[psutil.Process]
    joined_s: float
    model: str

    def used(self) -> Used:
        """What was used so far."""
        others = [psutil.Process(), *(one for process in self.simulations for one in serving(process))]
        num_bytes = int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
        return Used(time.perf_counter(), _cpu_s(serving(self.process)), _cpu_s(others), num_bytes)


class Step(NamedTuple):
    """What one number of workers cost."""

    num_workers: int
    joined_s: float
    idle_share: float  # of a core
    idle_bytes_per_s: float
    memory_bytes: int
    cpu_s_per_request: float
    bytes_per_request: float
    ttfts_s: Sequence[float]
    others_share: float  # of the cores that workers and clients share
    num_late: int
    asked_per_s: float

    @property
    def figures(self) -> tuple[str, ...]:
        """As the header names them."""
        return (
            str(self.num_workers),
            f"{self.joined_s:.1f}",
            f"{100 * self.idle_share:.1f}",
            f"{self.idle_bytes_per_s / 1e3:.0f}",
            f"{self.memory_bytes / 1e6:.0f}",
            f"{1e3 * self.cpu_s_per_request:.2f}",
            f"{self.bytes_per_request / 1e3:.0f}",
            f"{1e3 * median(self.ttfts_s):.0f}",
            f"{1e3 * quantiles(self.ttfts_s, n=100)[98]:.0f}",
            f"{100 * self.others_share:.0f}",
            str(self.num_late),
            f"{self.asked_per_s:.1f}",
        )


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(float(times.user + times.system) for times in (one.cpu_times() for one in processes))


@asynccontextmanager
async def running_target(num_workers: int) -> AsyncIterator[Target]:
    """Runs a gateway, and its simulated workers until all are members."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as state:
        supervisor = Supervisor(LogFiles(Path(state) / "logs"), lambda service, event: None)
        try:
            os.sched_setaffinity(0, cores[-1:])  # inherited by a child
            options = ("--port", "0", "--model-name", "demo", "--state-dir", state, "--slo", "off")
            gateway = await supervisor.start(ServiceSpec("gateway", ("-m", "services.gateway", *options), {}))
            os.sched_setaffinity(0, cores[:-1] or cores)
            ready = await gateway.ready
            started_s, simulations = time.perf_counter(), []
            for first in range(0, num_workers, _A_PROCESS):
                num = min(_A_PROCESS, num_workers - first)
                counts = ("--prefill", str(num // 2), "--decode", str(num - num // 2))
                where = ("--gateway", ready["address"], "--model-name", "demo")
                simulated = ServiceSpec(f"simulation-{first}", ("-m", "services.simulation", *where, *counts), {})
                simulations.append(psutil.Process((await supervisor.start(simulated)).process.pid))
            target = Target(ready["http"], psutil.Process(gateway.process.pid), simulations, 0.0, "demo")
            async with asyncio.timeout(_TIMEOUT_S):
                while len(await _workers(target)) < num_workers:  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.5)
            yield target._replace(joined_s=time.perf_counter() - started_s)
        finally:
            os.sched_setaffinity(0, cores)
            await supervisor.stop()


async def measured(num_workers: int, asked: Asked) -> Step:
    """Measures one number of workers."""
    async with running_target(num_workers) as target:
        await _asked(target, asked._replace(seconds=2.0))  # warms up
        await asyncio.sleep(2.0)
        start = target.used()
        await asyncio.sleep(asked.seconds)
        idle = target.used().since(start)
        late = await _num_late(target)
        memory_bytes = max(one.memory_info().rss for one in serving(target.process))
        start = target.used()
        ttfts_s = await _asked(target, asked)
        busy = target.used().since(start)
        late = max(late, await _num_late(target))
    idle_share, idle_bytes_per_s = idle.cpu_s / idle.at_s, idle.num_bytes / idle.at_s
    return Step(
        num_workers,
        target.joined_s,
        idle_share,
        idle_bytes_per_s,
        memory_bytes,
        (busy.cpu_s - idle_share * busy.at_s) / len(ttfts_s),
        (busy.num_bytes - idle_bytes_per_s * busy.at_s) / len(ttfts_s),
        ttfts_s,
        busy.others_s / busy.at_s / max(len(os.sched_getaffinity(0)) - 1, 1),
        late,
        len(ttfts_s) / busy.at_s,
    )


async def _asked(target: Target, asked: Asked) -> list[float]:
    """Seconds to the first token of requests that begin at equal intervals."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(_TIMEOUT_S)) as session:
        began_s, asking = time.perf_counter(), []
        for number in range(int(asked.rate * asked.seconds)):
            await asyncio.sleep(max(began_s + number / asked.rate - time.perf_counter(), 0.0))
            asking.append(asyncio.create_task(_ttft_s(session, target, number, asked.num_tokens)))
        return await asyncio.gather(*asking)


async def _ttft_s(session: aiohttp.ClientSession, target: Target, number: int, num_tokens: int) -> float:
    body = {"model": target.model, "prompt": f"{number} " + "moon " * _PROMPT_WORDS, "stream": True}
    body |= {"min_tokens": num_tokens, "max_tokens": num_tokens}
    started_s, first_s = time.perf_counter(), 0.0
    async with session.post(f"{target.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content:
            first_s = first_s or time.perf_counter() - started_s
    return first_s


async def _workers(target: Target) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{target.url}/halfmoon/v1/cluster") as response:
        found = await response.json()
    return [one | {"silent_after_s": found["silent_after_s"]} for one in found["workers"]]


async def _num_late(target: Target) -> int:
    return sum(worker["age_s"] > worker["silent_after_s"] for worker in await _workers(target))


async def measure(options: argparse.Namespace) -> None:
    """Prints a line for each number of workers, each ledger and each index, and what the target needs."""
    asked = Asked(options.rate, options.seconds, options.tokens)
    what = f"{asked.rate:g} requests/s of {asked.num_tokens} tokens, {asked.seconds:g} s"
    print(f"load average {os.getloadavg()[0]:.1f}; {what}")
    print("".join(f"{name:>16}" for name in _HEADER), flush=True)
    steps = []
    for num in options.workers:
        steps.append(await measured(num, asked))
        print("".join(f"{text:>16}" for text in steps[-1].figures), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for url in (f"sqlite:///{directory}/ledger.db", *options.ledger):
            rows_per_s, cpu_s = await ledger_rate(url)
            print(f"{url.partition(':')[0]}: {rows_per_s:.0f} rows/s, {1e6 * cpu_s:.0f} us of CPU a row in the gateway")
    index_s = 0.0
    for num in options.index:
        index_s, num_bytes = index_cost(num)
        print(
            f"index of {num} holders: {1e6 * index_s:.0f} us of CPU a message, {num_bytes:.1f} bytes a block and holder"
        )
    if len(steps) > 1:
        costs = Costs([(step.num_workers, step.idle_share) for step in steps], steps[-1].cpu_s_per_request, index_s)
        print("\n".join(needed(costs, options.target_workers, options.target_rate)))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 32, 128, 512, 1_000])
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--ledger", nargs="*", default=[], help="URLs of further ledgers to write to")
    parser.add_argument(
        "--index", type=int, nargs="*", default=[64, 1_000], help="numbers of holders of the index alone"
    )
    parser.add_argument("--target-workers", type=int, default=1_000)
    parser.add_argument("--target-rate", type=float, default=1_667.0, help="requests per second")
    run_service(lambda: measure(parser.parse_args()))


if __name__ == "__main__":
    main()
