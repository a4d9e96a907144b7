"""Throughput of one gateway process, and what it adds to the time to first token.

    python -m benchmarks.gateway.relay [--streams 1000] [--tokens 400] [--step-ms 0 50] [--repeat 3] [--traced]

A real gateway, alone on the last core that this process may use, between a worker that answers at once
(`instant_worker.py`) and a client that counts events without parsing them; worker and client share the other
cores. All streams run concurrently. With --traced each case is measured once more with a trace (OTLP) of every request.
Figures, medians over the repeats:

tokens/s        all tokens over the time from the first request to the last byte: all three processes together.
tokens/CPU s    tokens per CPU second of the gateway alone: what one core relays if nothing else is slow. For all
                work, and for tokens alone: the difference to a run of few tokens cancels the requests.
CPU ms/request  the rest of that difference: the cost of a request apart from its tokens.
tokens/event    tokens in one server-sent event: more than 1 where the gateway is behind.
added TTFT      one request at a time: HTTP request to first event, minus the time of the same Prefill call to the
                worker; over all requests, and over the fastest tenth of both, better if others use the core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil

from benchmarks.gateway.instant_worker import TEXT
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.pb.prefill_pb2 import PrefillRequest
from halfmoon.pb.prefill_pb2_grpc import PrefillStub
from halfmoon.pb.types_pb2 import Generation, SamplingParams
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import run_service
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor

_FEW_TOKENS = 8
_TIMEOUT_S = 300
_NUM_TTFT = 300
_NUM_WARM = 20
_PATIENT = ("--heartbeat-interval-s", "30")  # tolerates a busy machine
_EVENT = b"data: {"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Target:
    """A running gateway with its worker."""

    host: str
    port: int
    worker: str
    process: psutil.Process

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the gateway so far."""
        return sum(float(times.user + times.system) for times in (one.cpu_times() for one in serving(self.process)))


def serving(process: psutil.Process) -> list[psutil.Process]:
    """A supervised service's processes: the template that the supervisor started, and the child that serves."""
    return [process, *process.children(recursive=True)]


class Stream(asyncio.Protocol):
    """Owns one request over its own connection; counts events as they pass."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.num_events = 0
        self.num_tokens = 0
        self.first_s: float | None = None
        self.tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        seen = self.tail[1 - len(_EVENT) :] + data  # an event's mark may be split
        self.num_events += seen.count(_EVENT)
        if self.first_s is None and self.num_events:
            self.first_s = time.perf_counter()
        self.tail = (self.tail + data)[-1_000:]
        if self.tail.endswith(b"\r\n0\r\n\r\n") and not self.ended.done():
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the stream broke off: {self.tail[-300:]!r}"))

    def _end(self) -> None:
        usage = _USAGE.search(self.tail)
        if usage is None or b"[DONE]" not in self.tail:
            self.ended.set_exception(RuntimeError(f"no whole answer: {self.tail[-300:]!r}"))
            return
        self.num_tokens = int(usage[1])
        self.ended.set_result(None)


def request_bytes(num_tokens: int) -> bytes:
    """One streamed chat request."""
    body = json.dumps(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": TEXT}],
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def stream_once(target: Target, num_tokens: int) -> Stream:
    """Runs one whole stream; its connection stays open until the end."""
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(
        lambda: Stream(request_bytes(num_tokens)), target.host, target.port
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await stream.ended
    finally:
        transport.close()
    return stream


class Load(NamedTuple):
    """Totals over all streams."""

    num_tokens: int
    num_events: int
    wall_s: float
    cpu_s: float


async def load(target: Target, num_streams: int, num_tokens: int) -> Load:
    """Runs all streams concurrently."""
    cpu_s, started_s = target.cpu_s, time.perf_counter()
    streams = await asyncio.gather(*(stream_once(target, num_tokens) for _ in range(num_streams)))
    wall_s, cpu_s = time.perf_counter() - started_s, target.cpu_s - cpu_s
    return Load(sum(s.num_tokens for s in streams), sum(s.num_events for s in streams), wall_s, cpu_s)


async def times_to_first(target: Target) -> tuple[list[float], list[float]]:
    """Sorted seconds to the first token through the gateway and of the worker's own call, measured in turns."""
    checkpoint = prepare_checkpoint("demo")
    prompt = Tokenizer(checkpoint).encode_chat([{"role": "user", "content": TEXT}])
    through, direct = [], []
    async with Peer(target.worker) as peer:
        for _ in range(_NUM_TTFT):
            started_s = time.perf_counter()
            stream = await stream_once(target, 1)
            assert stream.first_s is not None
            through.append(stream.first_s - started_s)
            started_s = time.perf_counter()
            generation = Generation(
                request_id=secrets.token_hex(8), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1)
            )
            message = PrefillRequest(generation=generation)
            async with peer.stream(PrefillStub(peer.channel).Prefill, message, deadline_s=10) as events:
                async for _event in events:
                    break
            direct.append(time.perf_counter() - started_s)
    return sorted(through), sorted(direct)


class Case(NamedTuple):
    """One measured case."""

    step_ms: float
    is_traced: bool

    @property
    def title(self) -> str:
        """Title of its column."""
        return f"step {self.step_ms:g} ms" + (", traced" if self.is_traced else "")


@asynccontextmanager
async def running_target(case: Case) -> AsyncIterator[Target]:
    """Runs a gateway on its own core, and its worker on the others. Raises ServiceFailed when one of them ends."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as state:
        supervisor = Supervisor(LogFiles(Path(state) / "logs"), lambda service, event: None)
        try:
            async with asyncio.TaskGroup() as group:
                traced: tuple[str, ...] = ()
                if case.is_traced:
                    sink = await supervisor.start(ServiceSpec("sink", ("-m", "benchmarks.gateway.otlp_sink"), {}))
                    traced = ("--otlp-endpoint", (await sink.ready)["address"])
                os.sched_setaffinity(0, cores[-1:])  # inherited by a child
                options = ("--port", "0", "--model-name", "demo", "--state-dir", state, *traced, *_PATIENT)
                spec = ServiceSpec("gateway", ("-m", "services.gateway", *options), {})
                gateway = await supervisor.start(spec)
                os.sched_setaffinity(0, cores[:-1] or cores)
                watch = group.create_task(supervisor.until_one_ends())
                ready = await gateway.ready
                which = ("--gateway", ready["address"], "--step-ms", str(case.step_ms))
                await supervisor.start(ServiceSpec("worker", ("-m", "benchmarks.gateway.instant_worker", *which), {}))
                host, _, port = ready["http"].removeprefix("http://").rpartition(":")
                worker = await _worker_address(ready["http"])
                yield Target(host, int(port), worker, psutil.Process(gateway.process.pid))
                watch.cancel()
        finally:
            os.sched_setaffinity(0, cores)
            await supervisor.stop()


async def _worker_address(url: str) -> str:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/halfmoon/v1/cluster") as response:
                workers: list[dict[str, Any]] = (await response.json())["workers"]
                if workers and workers[0]["listening"]:
                    return str(workers[0]["address"])
            await asyncio.sleep(0.05)


async def figures(case: Case, num_streams: int, num_tokens: int) -> dict[str, float]:
    """All figures of one run."""
    async with running_target(case) as target:
        await load(target, _NUM_WARM, _FEW_TOKENS)
        through_s, direct_s = await times_to_first(target)
        few = await load(target, num_streams, _FEW_TOKENS)
        many = await load(target, num_streams, num_tokens)
    token_cpu_s = (many.cpu_s - few.cpu_s) / (many.num_tokens - few.num_tokens)
    request_cpu_s = (few.cpu_s - few.num_tokens * token_cpu_s) / num_streams
    return {
        "tokens/s": many.num_tokens / many.wall_s,
        "tokens/CPU s, all work": many.num_tokens / many.cpu_s,
        "tokens/CPU s, tokens alone": 1 / token_cpu_s,
        "CPU s/1,000 tokens": 1_000 * token_cpu_s,
        "CPU ms/request": 1_000 * request_cpu_s,
        "tokens/event": many.num_tokens / (many.num_events - 3 * num_streams),
        "gateway's share of its core": many.cpu_s / many.wall_s,
        "TTFT ms": 1_000 * statistics.median(through_s),
        "added TTFT ms": 1_000 * (statistics.median(through_s) - statistics.median(direct_s)),
        "added TTFT ms, fastest tenth": 1_000 * (through_s[_NUM_TTFT // 20] - direct_s[_NUM_TTFT // 20]),
    }


async def measure(cases: Sequence[Case], num_streams: int, num_tokens: int, repeat: int) -> None:
    """Measures and prints."""
    results: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(repeat):
        for case in cases:
            results[case].append(await figures(case, num_streams, num_tokens))
    print(f"{num_streams} streams of {num_tokens} tokens" + "".join(f"{case.title:>22}" for case in cases))
    for name in results[cases[0]][0]:
        medians = [statistics.median(run[name] for run in results[case]) for case in cases]
        print(f"{name:30}" + "".join(f"{median:22.3f}" for median in medians))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 50.0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--traced", action="store_true", help="also measure with tracing")
    arguments = parser.parse_args()
    cases = [Case(step, traced) for step in arguments.step_ms for traced in (False, True)[: 1 + arguments.traced]]
    run_service(lambda: measure(cases, arguments.streams, arguments.tokens, arguments.repeat))


if __name__ == "__main__":
    main()
