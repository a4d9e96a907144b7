"""What one gateway and its ledger cost in a cluster of many workers.

    python -m benchmarks.scale [--workers 8 32 128 512 1000] [--rate 20] [--seconds 30] [--ledger postgresql://…]

A real gateway, on the last core that this process may use, with as many simulated workers, half of them for prefill;
workers and clients share the other cores. Each step measures:

idle CPU        of the gateway while nothing is asked: it reads each worker's report every second.
memory          of the gateway, all workers being members.
CPU ms/request  of the gateway while requests arrive at `--rate`, beyond what it uses while idle.
TTFT            of these requests; simulated workers compute nothing, but the gateway's own time is in it.
late            reports: whether any worker was shown as silent.

Then rows of requests are written to a ledger as fast as it takes them: SQLite's, and that at `--ledger`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.gateway import serving
from halfmoon.ledger.ledger import open_ledger
from halfmoon.ledger.models import RequestRow
from halfmoon.rpc.server import run_service
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.supervisor import Supervisor

_OUTPUT_TOKENS = 100
_PROMPT_WORDS = 300
_A_PROCESS = 256  # simulated workers in one process
_TIMEOUT_S = 600.0
_NUM_ROWS = 20_000
_SCALE = "20"  # simulated workers are this much slower than their profile, as busy ones are
_HEADER = ("workers", "idle CPU %", "memory MB", "CPU ms/request", "TTFT p50 ms", "TTFT p99 ms", "late", "asked/s")


class Target(NamedTuple):
    """A running gateway."""

    url: str
    process: psutil.Process
    model: str

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return sum(float(times.user + times.system) for times in (one.cpu_times() for one in serving(self.process)))


class Step(NamedTuple):
    """What one number of workers cost."""

    idle_share: float  # of a core
    memory_bytes: int
    cpu_s_per_request: float
    ttfts_s: Sequence[float]
    num_late: int
    asked_per_s: float


@asynccontextmanager
async def running_target(num_workers: int) -> AsyncIterator[Target]:
    """Runs a gateway, and its simulated workers until all are members."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as state:
        supervisor = Supervisor(Path(state) / "logs", lambda service, event: None)
        try:
            os.sched_setaffinity(0, cores[-1:])  # inherited by a child
            options = ("--port", "0", "--model-name", "demo", "--state-dir", state, "--slo", "off")
            gateway = await supervisor.start(ServiceSpec("gateway", ("-m", "services.gateway", *options), {}))
            os.sched_setaffinity(0, cores[:-1] or cores)
            ready = await gateway.ready
            for first in range(0, num_workers, _A_PROCESS):
                num = min(_A_PROCESS, num_workers - first)
                counts = ("--prefill", str(num // 2), "--decode", str(num - num // 2), "--time-scale", _SCALE)
                where = ("--gateway", ready["address"], "--model-name", "demo")
                command = ("-m", "services.simulation", *where, *counts)
                await supervisor.start(ServiceSpec(f"simulation-{first}", command, {}))
            target = Target(ready["http"], psutil.Process(gateway.process.pid), "demo")
            async with asyncio.timeout(_TIMEOUT_S):
                while len(await _workers(target)) < num_workers:  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.5)
            yield target
        finally:
            os.sched_setaffinity(0, cores)
            await supervisor.stop()


async def measured(num_workers: int, rate: float, seconds: float) -> Step:
    """Measures one number of workers."""
    async with running_target(num_workers) as target:
        await _asked(target, 2 * rate, 2.0)  # warms up
        await asyncio.sleep(2.0)
        idle_share, late = await _idle(target, seconds)
        memory_bytes = max(one.memory_info().rss for one in serving(target.process))
        cpu_s, started_s = target.cpu_s, time.perf_counter()
        ttfts_s = await _asked(target, rate, seconds)
        took_s = time.perf_counter() - started_s
        busy_s = target.cpu_s - cpu_s - idle_share * took_s
        late = max(late, await _num_late(target))
    return Step(idle_share, memory_bytes, busy_s / len(ttfts_s), ttfts_s, late, len(ttfts_s) / took_s)


async def _idle(target: Target, seconds: float) -> tuple[float, int]:
    cpu_s, started_s = target.cpu_s, time.perf_counter()
    await asyncio.sleep(seconds)
    share = (target.cpu_s - cpu_s) / (time.perf_counter() - started_s)
    return share, await _num_late(target)


async def _asked(target: Target, rate: float, seconds: float) -> list[float]:
    """Seconds to the first token of requests that begin at equal intervals."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(_TIMEOUT_S)) as session:
        began_s, asking = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(began_s + number / rate - time.perf_counter(), 0.0))
            asking.append(asyncio.create_task(_ttft_s(session, target, number)))
        return await asyncio.gather(*asking)


async def _ttft_s(session: aiohttp.ClientSession, target: Target, number: int) -> float:
    prompt = f"{number} " + "moon " * _PROMPT_WORDS
    body = {"model": target.model, "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "stream": True}
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


async def ledger_rate(url: str) -> tuple[float, float]:
    """Rows per second that a ledger takes, and CPU seconds of this process for a row."""
    async with open_ledger(url) as ledger:
        rows = [_row(number) for number in range(_NUM_ROWS)]
        cpu_s, started_s = time.process_time(), time.perf_counter()
        for row in rows:
            while not ledger.record(row):  # noqa: ASYNC110 (its queue is full)
                await asyncio.sleep(0.001)
        while len(await ledger.recent(1)) == 0 or not await _has(ledger, rows[-1].request_id):  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
        return _NUM_ROWS / (time.perf_counter() - started_s), (time.process_time() - cpu_s) / _NUM_ROWS


async def _has(ledger: Any, request_id: str) -> bool:
    return await ledger.outcomes.of(request_id) is not None


def _row(number: int) -> RequestRow:
    return RequestRow(
        request_id=f"cmpl-{time.time_ns():x}-{number}",
        created_at=datetime.now(UTC),
        model="demo",
        endpoint="completions",
        status="ok",
        http_status=200,
        prompt_tokens=1_500,
        cached_tokens=512,
        output_tokens=300,
        finish_reason="stop",
        prefill_worker="prefill-1",
        decode_worker="decode-1",
        ttft_s=0.2,
        e2e_s=6.0,
        num_retries=0,
        num_outputs=1,
        qos_class="default",
    )


async def measure(options: argparse.Namespace) -> None:
    """Prints a line for each number of workers and each ledger."""
    print(f"load average {os.getloadavg()[0]:.1f}; {options.rate:g} requests/s, {options.seconds:g} s")
    print("".join(f"{name:>16}" for name in _HEADER), flush=True)
    for num in options.workers:
        step = await measured(num, options.rate, options.seconds)
        p99_s = quantiles(step.ttfts_s, n=100)[98]
        figures = (
            f"{100 * step.idle_share:.1f}",
            f"{step.memory_bytes / 1e6:.0f}",
            f"{1e3 * step.cpu_s_per_request:.2f}",
            f"{1e3 * median(step.ttfts_s):.0f}",
            f"{1e3 * p99_s:.0f}",
            str(step.num_late),
            f"{step.asked_per_s:.1f}",
        )
        print("".join(f"{text:>16}" for text in (str(num), *figures)), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for url in (f"sqlite:///{directory}/ledger.db", *options.ledger):
            rows_per_s, cpu_s = await ledger_rate(url)
            print(f"{url.partition(':')[0]}: {rows_per_s:.0f} rows/s, {1e6 * cpu_s:.0f} us of CPU a row in the gateway")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 32, 128, 512, 1_000])
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ledger", nargs="*", default=[], help="URLs of further ledgers to write to")
    run_service(lambda: measure(parser.parse_args()))


if __name__ == "__main__":
    main()
