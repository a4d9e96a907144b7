"""KV transfers between two processes, compared with one plain memcpy of the same bytes.

    python -m benchmarks.kv.transfer                  # transports x chunk sizes x codecs, then a real hand-over
    python -m benchmarks.kv.transfer --no-handover --transports grpc shm --chunks 1024 --repeat 9
    python -m benchmarks.kv.transfer --mbps 50 --delay-ms 5 --transports grpc
    python -m benchmarks.kv.transfer --tls --chunks 2048   # each table again, over mutual TLS

One transfer is the KV of `--tokens` tokens of the demo model (30 layers, 3 KV heads of 64, bfloat16). It is gathered
layer by layer into staging buffers and written to other memory by the receiver, a separate process. GB/s count KV as it
is in memory, before the codec; CPU seconds are those of both processes. The hand-over uses a real prefill and a real
decode worker: exposed time runs from the first token, which ends the prefill, to the decode worker's DONE.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from benchmarks.kv.handover import WORKER, hand_over, process, work
from benchmarks.kv.tls_certificates import BenchmarkCertificates, benchmark_certificates
from halfmoon.freed_memory import keep_freed_memory
from halfmoon.kv.codec import Codec, decode, encode
from halfmoon.kv.frame import KVRange, plan_frames
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.receiver import Effect, Write
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import run_service, running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transfer import KV_TRANSFER, PUSH, KVIntake, TransferSender, raw_service, transfer_to
from halfmoon.rpc.transport.link import KVLink, LinkSettings

LAYOUT = KVLayout(30, 3, 64, "bfloat16", 64)
_RECEIVER = "receiver"  # argument that makes this file the receiving process


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the table: medians over the repeats."""

    seconds: float
    cpu_s: float  # both processes


async def receive() -> None:
    """Runs the receiving process: writes incoming KV to memory until its stdin closes."""
    arena = np.zeros((LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, 8192, LAYOUT.head_dim), np.uint16)
    intake = KVIntake()

    async def act(effect: Effect) -> None:
        if isinstance(effect, Write):
            part = effect.range
            values = decode(effect.codec, effect.payload, part.shape(LAYOUT), LAYOUT.dtype)
            tokens = slice(part.token_start, part.token_start + part.num_tokens)
            await asyncio.to_thread(np.copyto, arena[part.layer_start : part.layer_end, :, :, tokens], values)

    async def push(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async with aclosing(intake.receive(messages, LAYOUT, act, 60)) as answers:
            async for answer in answers:
                yield answer

    access = CallAccess(own_credential("worker"))
    add = raw_service(KV_TRANSFER, {PUSH: push})
    async with running_server(
        "127.0.0.1:0", [add], RpcMetrics(CollectorRegistry()), grace_s=0, access=access
    ) as server:
        print(f"127.0.0.1:{server.port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    intake.close()


async def send(transfer: TransferSender, kv: NDArray[np.uint16], chunk_bytes: int, codec: Codec) -> None:
    """Sends one whole transfer. kv: [layers, 2, heads, tokens, head_dim]"""
    num_tokens = kv.shape[3]
    await transfer.open(KVRange(0, LAYOUT.num_layers, 0, LAYOUT.num_kv_heads, 0, num_tokens), b"")
    for part in plan_frames(LAYOUT, LAYOUT.whole(), 0, num_tokens, chunk_bytes):
        tokens = slice(part.token_start, part.token_start + part.num_tokens)
        values = kv[part.layer_start : part.layer_end, :, :, tokens]
        if codec is Codec.RAW:
            buffer = await transfer.buffer(values.nbytes)
            room = np.frombuffer(buffer.view, np.uint16).reshape(values.shape)
            await asyncio.to_thread(np.copyto, room, values)
            await transfer.data(part, buffer)
        else:
            await transfer.data(part, await asyncio.to_thread(encode, codec, values, LAYOUT.dtype), codec)
    await transfer.commit(b"")


async def measure(
    link: KVLink, other: psutil.Process, kv: NDArray[np.uint16], chunk_bytes: int, codec: Codec, repeat: int
) -> Figures:
    """Measures transfers over one link; the first, which touches new memory, does not count."""
    seconds, cpu_s = [], []
    for _ in range(repeat + 1):
        before_s, cpu_before_s = time.perf_counter(), _cpu_s(other)
        async with transfer_to(link, LAYOUT, deadline_s=600) as transfer:
            await send(transfer, kv, chunk_bytes, codec)
        seconds.append(time.perf_counter() - before_s)
        cpu_s.append(_cpu_s(other) - cpu_before_s)
    return Figures(statistics.median(seconds[1:]), statistics.fmean(cpu_s[1:]))


def memcpy(kv: NDArray[np.uint16], repeat: int) -> Figures:
    """Copies the same bytes once, layer by layer, in this process."""
    there, seconds = np.zeros_like(kv), []
    for _ in range(repeat + 1):
        before_s = time.perf_counter()
        for layer in range(len(kv)):
            np.copyto(there[layer], kv[layer])
        seconds.append(time.perf_counter() - before_s)
    return Figures(statistics.median(seconds[1:]), statistics.median(seconds[1:]))


def _cpu_s(other: psutil.Process) -> float:
    times = other.cpu_times()
    return float(times.user + times.system) + time.process_time()


async def run(options: argparse.Namespace) -> None:
    """Prints both tables, and again over mutual TLS if that is wanted."""
    with benchmark_certificates() as certificates:
        for tls in (None, certificates) if options.tls else (None,):
            if not options.no_transports:
                await transports(options, tls)
            if not options.no_handover:
                limit = options.mbps, options.delay_ms
                await hand_over(options.transports, options.tokens, options.repeat, options.codecs, limit, tls)


async def transports(options: argparse.Namespace, tls: BenchmarkCertificates | None) -> None:
    """Prints the table of transports."""
    shape = (LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, options.tokens, LAYOUT.head_dim)
    normal = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    kv = (normal.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
    print(f"{kv.nbytes / 2**20:.0f} MiB a transfer{', mutual TLS' if tls else ''}, median of {options.repeat}")
    print(f"{'transport':10}{'chunk KiB':>10}{'codec':>7}{'GB/s':>8}{'CPU s/GB':>10}{'x memcpy time':>15}")
    plain = memcpy(kv, options.repeat)
    _row("memcpy", "-", "-", plain, kv.nbytes, plain)
    credential = tls.credential("worker") if tls else None
    async with process(_RECEIVER, tls=tls.worker if tls else None) as (other, address):
        for name in options.transports:
            settings = _settings(name, options.mbps, options.delay_ms)
            link = KVLink(
                Peer(address, credential, "worker"), settings, lambda declined: print(f"{declined} could not be used")
            )
            for codec, chunk_kib in itertools.product(options.codecs, options.chunks):
                figures = await measure(link, other, kv, chunk_kib << 10, Codec[codec.upper()], options.repeat)
                _row(name, str(chunk_kib), codec, figures, kv.nbytes, plain)
            estimate = link.estimator.estimate
            if estimate is not None:
                print(f"  estimate: {estimate.bandwidth_bytes_per_s / 1e9:.2f} GB/s, {estimate.latency_s * 1e3:.2f} ms")
            await link.close()


def _settings(transport: str, mbps: float, delay_ms: float) -> LinkSettings:
    return LinkSettings(transports=(transport,), bytes_per_s=mbps * 1e6 or None, delay_s=delay_ms / 1e3)


def _row(name: str, chunk: str, codec: str, figures: Figures, num_bytes: int, plain: Figures) -> None:
    rate, cpu = num_bytes / 1e9 / figures.seconds, figures.cpu_s / (num_bytes / 1e9)
    print(f"{name:10}{chunk:>10}{codec:>7}{rate:8.3f}{cpu:10.2f}{figures.seconds / plain.seconds:15.1f}")


def main(arguments: Sequence[str]) -> None:
    """Reads the command line."""
    keep_freed_memory()
    if arguments[:1] == [_RECEIVER]:
        run_service(receive)
        return
    if arguments[:1] == [WORKER]:
        role, transport, mbps, delay_ms = arguments[1:]
        run_service(lambda: work(role, _settings(transport, float(mbps), float(delay_ms))))
        return
    parser = argparse.ArgumentParser(prog="benchmarks.kv.transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transports", nargs="+", default=["grpc", "shm"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[256, 512, 1024, 2048], help="KiB")
    parser.add_argument("--codecs", nargs="+", default=["raw"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--mbps", type=float, default=0.0, help="limit of the link in MB/s")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one-way delay of the link")
    parser.add_argument("--tls", action="store_true", help="measures over mutual TLS, too")
    parser.add_argument("--no-transports", action="store_true", help="only the hand-over")
    parser.add_argument("--no-handover", action="store_true", help="only the transports")
    options = parser.parse_args(arguments)
    run_service(lambda: run(options))


if __name__ == "__main__":
    main(sys.argv[1:])
