"""A real prefill and a real decode worker, and the cost of a hand-over between them. Used by kv_transfer."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import psutil

from benchmarks.kv.tls_certificates import BenchmarkCertificates
from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.pb import decode_pb2, decode_pb2_grpc, gateway_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.worker.handover.kv_channels import KVChannels
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.decode_servicer import DecodeServicer
from halfmoon.worker.servicers.prefill_servicer import PrefillServicer
from halfmoon.worker.serving import worker_services
from halfmoon.worker.state import WorkerState

WORKER = "worker"  # argument that makes kv_transfer one of the workers
_GATEWAY = "benchmark"
_VOCABULARY = range(1000, 30000)


@asynccontextmanager
async def process(*arguments: str, tls: Mapping[str, str] | None = None) -> AsyncIterator[tuple[psutil.Process, str]]:
    """Runs kv_transfer as another process and reads its first line. It ends when its stdin closes.

    `tls`: variables that name its certificate, if it uses mutual TLS.
    """
    command = (sys.executable, "-m", "benchmarks.kv.transfer", *arguments)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env={**os.environ, **(tls or {})})
    assert child.stdout is not None
    try:
        yield psutil.Process(child.pid), (await child.stdout.readline()).decode().strip()
    finally:
        await child.communicate(b"")  # closes its stdin


async def work(role: str, settings: LinkSettings) -> None:
    """Runs one worker with the demo model and no gateway. Prints its address."""
    checkpoint = await asyncio.to_thread(prepare_checkpoint, "demo")
    config = EngineConfig(num_threads=1, prefix_cache=False, kv_memory_bytes=512 << 20)
    engine = await asyncio.to_thread(Engine, checkpoint, config)
    metrics = WorkerMetrics()
    identity = gateway_pb2.WorkerIdentity(
        worker_id=role, role=types_pb2.Role.Value(role.upper()), model_fingerprint=checkpoint.fingerprint
    )
    state = WorkerState(identity, engine.layout, metrics)
    credential = own_credential("worker")
    async with AsyncEngine(engine, state.on_step) as async_engine:
        prefill = PrefillServicer(async_engine, state, metrics, KVChannels(settings, credential=credential))
        decode = DecodeServicer(async_engine, state, metrics)
        services = worker_services(prefill, decode)
        access = CallAccess(credential)
        async with running_server("127.0.0.1:0", services, metrics.rpc, grace_s=0, access=access) as server:
            print(f"127.0.0.1:{server.port} {checkpoint.fingerprint}", flush=True)
            await asyncio.to_thread(sys.stdin.read)
        await prefill.close()
        decode.close()


async def hand_over(
    transports: Sequence[str],
    num_tokens: int,
    repeat: int,
    codecs: Sequence[str],
    limit: tuple[float, float],
    tls: BenchmarkCertificates | None = None,
) -> None:
    """Prints the table of hand-overs: medians over the repeats after a first one that does not count.

    The codecs take turns. `auto` is what the worker chooses of the exact ones, `auto-int8` of these and int8.
    limit: the link's MB/s (0: unlimited) and its delay in ms. tls: certificates, for mutual TLS.
    """
    mbps, delay_ms = limit
    link = f", link of {mbps:g} MB/s and {delay_ms:g} ms" if mbps or delay_ms else ""
    link += ", mutual TLS" if tls else ""
    print(f"\nhand-over of {num_tokens} tokens, one thread a worker{link}, median of {repeat}")
    print(f"{'transport':10}{'codec':>10}{'prefill s':>11}{'exposed ms':>12}{'share':>8}{'MB sent':>9}")
    for transport in transports:
        how = transport, str(mbps), str(delay_ms)
        worker = tls.worker if tls else None
        caller = tls.credential("profiler") if tls else None
        async with (
            process(WORKER, "decode", *how, tls=worker) as (_, d),
            process(WORKER, "prefill", *how, tls=worker) as (_, p),
        ):
            (prefill, fingerprint), decode = p.split(), d.split()[0]
            async with Peer(prefill, caller) as to_prefill, Peer(decode, caller) as to_decode:
                tokens = decode_pb2_grpc.DecodeStub(to_decode.channel).Tokens
                listen = decode_pb2.TokensRequest(gateway_id=_GATEWAY)
                async with to_decode.stream(tokens, listen, deadline_s=3600) as steps:
                    await anext(steps)
                    runs: dict[str, list[_Figures]] = {codec: [] for codec in codecs}
                    for number in range(repeat + 1):
                        for codec in codecs:
                            one = await _one(to_prefill, decode, fingerprint, num_tokens, codec, number)
                            runs[codec] += [one] if number else []
                    for codec in codecs:
                        _print_row(transport, codec, runs[codec])


class _Figures(NamedTuple):
    prefill_s: float
    exposed_s: float
    sent_bytes: int


def _print_row(transport: str, codec: str, runs: Sequence[_Figures]) -> None:
    prefill_s, exposed_s, sent_bytes = (statistics.median(figures) for figures in zip(*runs, strict=True))
    share = statistics.median(run.exposed_s / run.prefill_s for run in runs)
    print(f"{transport:10}{codec:>10}{prefill_s:11.3f}{exposed_s * 1e3:12.1f}{share:8.1%}{sent_bytes / 1e6:9.1f}")


async def _one(to_prefill: Peer, decode: str, fingerprint: str, num_tokens: int, codec: str, number: int) -> _Figures:
    auto, _, lossiest = codec.partition("-")
    named = (lossiest or "raw") if auto == "auto" else codec
    rng = random.Random(number)
    request = prefill_pb2.PrefillRequest(
        generation=types_pb2.Generation(
            request_id=f"{codec}-{number}",
            model_fingerprint=fingerprint,
            prompt_token_ids=rng.choices(_VOCABULARY, k=num_tokens),
            sampling=types_pb2.SamplingParams(max_tokens=2, top_p=1, repetition_penalty=1, ignore_eos=True),
            gateway_id=_GATEWAY,
        ),
        decode_address=decode,
        kv_codec=prefill_pb2.KVCodec.Value(named.upper()),
        chooses_codec=auto == "auto",
    )
    stub = prefill_pb2_grpc.PrefillStub(to_prefill.channel)
    async with to_prefill.stream(stub.Prefill, request, deadline_s=600) as events:
        first, handed_over = [event async for event in events]
    done = handed_over.handed_over
    return _Figures(first.first_token.compute_s, done.transfer_s, done.kv_bytes)
