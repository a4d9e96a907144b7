"""Long prompts over several prefill workers.

    python -m benchmarks.prefixes.shared_prompts [--workers 2] [--tokens 2048,4096]

Measured, without a gateway: prefill workers with the demo model, one process and one thread each; each prompt on one of
them alone and over all of them, alternately, its segments planned by the worker's own times alone. Measured with
`--slow`: workers in this process whose layers take a given time each, as devices apart from this host's cores would
(`slow_workers.py`), so that more workers than cores can be compared; the rest, KV on its way included, is real.
Predicted: by the rule that gateways use and a roofline's times, the first token of a prompt over 1 to 8 workers, and
what the simulator makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.prefixes.restoring_worker import killed_at_the_end, made_up
from benchmarks.prefixes.slow_workers import slow_worker, tiny_checkpoint
from halfmoon.background import running
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.pb import prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, fit_prefill
from halfmoon.policy.models.segments import SEGMENT_PASSES, SegmentPlan, SegmentWorker, plan_segments
from halfmoon.rpc.peer import Peer
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Network, WorkerGroup
from halfmoon.sim.latency_sources.host_workers import worker_model
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.model_catalogue import model_shape
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

REPEATS = 3
STEP_TOKENS, BLOCK_TOKENS = 512, 64  # of a worker on a CPU
PREDICTED = (8_192, 32_768, 131_072)  # tokens
DEGREES = (1, 2, 3, 4, 6, 8)
GPU_STEP_TOKENS = 8_192
NETWORK_BYTES_PER_S = 50e9
SLOW = PrefillModel(0.02, 1e-3, 5e-8)
_NO_GATEWAY = "127.0.0.1:1"  # workers retry it now and then
_PREFILL_S = 200.0


class Workers:
    """Owns the connections to prefill workers that serve no gateway. No request shares cached blocks with another."""

    def __init__(self, peers: Sequence[Peer], fingerprint: str) -> None:
        self._peers = peers
        self._stubs = [prefill_pb2_grpc.PrefillStub(peer.channel) for peer in peers]
        self._fingerprint = fingerprint
        self._names = (f"{id(self)}-{number}" for number in itertools.count())

    async def alone_s(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token on one worker, and the token."""
        return await self._first(len(self._peers) - 1, self._request(prompt, next(self._names)))

    async def shared_s(self, prompt: Sequence[int], plan: SegmentPlan) -> tuple[float, int]:
        """Seconds to the first token over all workers, and the token."""
        name, degree = next(self._names), plan.degree
        addresses = [peer.address for peer in self._peers]
        requests = [self._request(prompt[:end], name) for end in plan.ends[-degree:]]
        for number, request in enumerate(requests):
            shares = prefill_pb2.PromptShares(addresses=addresses, segment_ends=plan.ends, own=number)
            request.shares.CopyFrom(shares)
        async with AsyncExitStack() as stack:
            for number in range(degree - 1):
                await stack.enter_async_context(running(self._first(number, requests[number], holds=True)))
            return await self._first(degree - 1, requests[-1])

    async def _first(
        self, number: int, request: prefill_pb2.PrefillRequest, *, holds: bool = False
    ) -> tuple[float, int]:
        began_s, token_id = time.perf_counter(), -1
        stream = self._peers[number].stream(self._stubs[number].Prefill, request, deadline_s=_PREFILL_S)
        async with stream as events:
            async for event in events:
                token_id = event.first_token.token.token_id
                if not holds:
                    break
        return time.perf_counter() - began_s, token_id

    def _request(self, prompt: Sequence[int], name: str) -> prefill_pb2.PrefillRequest:
        sampling = types_pb2.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1, ignore_eos=True)
        generation = types_pb2.Generation(
            request_id=name, model_fingerprint=self._fingerprint, prompt_token_ids=prompt, sampling=sampling,
            gateway_id="benchmark", tenant_salt=name.encode(),
        )  # fmt: skip
        return prefill_pb2.PrefillRequest(generation=generation, decode_address=_NO_GATEWAY)


async def measured(num_workers: int, lengths: Sequence[int]) -> None:
    """Prints one row for each length."""
    fingerprint = (await asyncio.to_thread(prepare_checkpoint, "demo")).fingerprint
    arguments = ("--gateway", _NO_GATEWAY, "--calibrate", "never", "--num-threads", "1")
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(killed_at_the_end("services.prefill", *arguments))
            for _ in range(num_workers)
        ]
        peers = [await stack.enter_async_context(Peer(address)) for address in addresses]
        workers, seeds = Workers(peers, fingerprint), itertools.count()
        model = await _model(workers, lengths)
        print(f"one worker: {', '.join(f'{one:.3g}' for one in model)}")
        print(f"| tokens | 1 worker (s) | {num_workers} workers (s) | ratio | planned (s) |\n|---|---|---|---|---|")
        worker = SegmentWorker(model, STEP_TOKENS)
        for length in lengths:
            plan = plan_segments([worker] * num_workers, length, 0, BLOCK_TOKENS, SEGMENT_PASSES)
            if plan is None:
                print(f"| {length:,} | too short |")
                continue
            times: list[list[float]] = [[], []]
            for _ in range(REPEATS):
                prompt = made_up(length, next(seeds))
                alone_s, expected = await workers.alone_s(prompt)
                shared_s, token = await workers.shared_s(prompt, plan)
                assert token == expected, "several workers sample what one samples"
                times[0].append(alone_s)
                times[1].append(shared_s)
            one, many = map(median, times)
            print(f"| {length:,} | {one:.2f} | {many:.2f} | {one / many:.2f} | {plan.seconds:.2f} |", flush=True)


async def slowed(degrees: Sequence[int], lengths: Sequence[int]) -> None:
    """Prints one row for each length, over workers that compute apart from this host's cores."""
    with tempfile.TemporaryDirectory() as path:
        checkpoint = tiny_checkpoint(Path(path))
        async with AsyncExitStack() as stack:
            num_blocks = 2 * max(lengths) // BLOCK_TOKENS
            made = [
                await stack.enter_async_context(slow_worker(checkpoint, SLOW, num_blocks)) for _ in range(max(degrees))
            ]
            peers = [await stack.enter_async_context(Peer(address)) for address in made]
            print(
                "| tokens | 1 worker (s) |", " | ".join(f"{one} workers: s, ratio, planned s" for one in degrees), "|"
            )
            print("|---" * (len(degrees) + 2) + "|")
            for length in lengths:
                prompt = [3 + token % 500 for token in made_up(length, length)]
                every = Workers(peers, checkpoint.fingerprint)
                alone = [await every.alone_s(prompt) for _ in range(REPEATS)]
                alone_s, cells = median(seconds for seconds, _ in alone), []
                for degree in degrees:
                    plan = plan_segments(
                        [SegmentWorker(SLOW, STEP_TOKENS)] * degree, length, 0, BLOCK_TOKENS, SEGMENT_PASSES
                    )
                    assert plan is not None, "the prompt is too short"
                    workers = Workers(peers[:degree], checkpoint.fingerprint)
                    shared = [await workers.shared_s(prompt, plan) for _ in range(REPEATS)]
                    assert {token for _, token in shared} == {token for _, token in alone}
                    seconds = median(seconds for seconds, _ in shared)
                    cells.append(f"{seconds:.2f}, {alone_s / seconds:.2f}, {plan.seconds:.2f}")
                print(f"| {length:,} | {alone_s:.2f} | {' | '.join(cells)} |", flush=True)


async def _model(workers: Workers, lengths: Sequence[int]) -> PrefillModel:
    """The times of one worker."""
    samples = []
    for length in sorted({512, 1024, *lengths}):
        await workers.alone_s(made_up(length, -length))
        seconds = [(await workers.alone_s(made_up(length, -length)))[0] for _ in range(2)]
        samples.append(PrefillSample(length, 0, min(seconds)))
    return fit_prefill(samples)


def predicted(name: str, gpu: str, tensor_parallel: int) -> None:
    """Prints the seconds to the first token by the number of workers."""
    latency = worker_model(Roofline(model_shape(name)), gpu, tensor_parallel, 1, 1)
    worker = SegmentWorker(
        latency.policy_prefill, GPU_STEP_TOKENS, 0.0, latency.kv_bytes_per_token / NETWORK_BYTES_PER_S
    )
    print(f"| {name}, TP{tensor_parallel} on {gpu} |", " | ".join(f"{one:,} tokens (s)" for one in PREDICTED), "|")
    print("|---" * (len(PREDICTED) + 1) + "|")
    for degree in DEGREES:
        cells = []
        for length in PREDICTED:
            plan = plan_segments([worker] * degree, length, 0, BLOCK_TOKENS, SEGMENT_PASSES)
            planned = "" if plan is None else f"{plan.seconds:.2f} planned, "
            cells.append(f"{planned}{_simulated_s(latency, degree, length):.2f}")
        print(f"| {degree} workers | {' | '.join(cells)} |")


def _simulated_s(latency: LatencyModel, degree: int, length: int) -> float:
    """TTFT of one prompt on an idle simulated cluster, as the live rule decides."""
    limits = BatchLimits(max_batch_tokens=GPU_STEP_TOKENS)
    groups = (
        WorkerGroup("prefill", degree, latency, limits, layer_passes=5, kv_tokens=4 * max(PREDICTED)),
        WorkerGroup("decode", 1, latency, limits, kv_tokens=4 * max(PREDICTED)),
    )
    spec = ClusterSpec(groups, Network(bytes_per_s=NETWORK_BYTES_PER_S), max_prefill_degree=max(degree, 2))
    one = np.ones(1, dtype=np.int64)
    return float(simulate(spec, Workload(np.zeros(1), length * one, 2 * one), policies="always").ttft_s[0])


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="0: predictions alone")
    parser.add_argument("--tokens", default="1024,2048,4096,7000")
    parser.add_argument(
        "--slow", default="", help="numbers of workers that compute apart from this host's cores: 2,3,4"
    )
    parser.add_argument("--slow-tokens", default="2048,4096,8192")
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--tensor-parallel", type=int, default=8)
    options = parser.parse_args()
    predicted(options.model, options.gpu, options.tensor_parallel)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}))
    if options.slow:
        degrees, lengths = ([int(one) for one in text.split(",")] for text in (options.slow, options.slow_tokens))
        asyncio.run(slowed(degrees, lengths))
    if options.workers:
        asyncio.run(measured(options.workers, [int(one) for one in options.tokens.split(",")]))


if __name__ == "__main__":
    main()
