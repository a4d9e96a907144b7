"""A worker that computes nothing and answers at once, so that measurements with it show the gateway alone.

    python -m benchmarks.gateway.instant_worker --gateway 127.0.0.1:5000 [--step-ms 50]

It speaks the workers' protocol in the role `both`. Every prompt gets its first token on arrival, every running request
one token per step; the tokens are those of a text, repeated. A step follows the last as soon as the gateway takes it,
or after `--step-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import grpc
from prometheus_client import CollectorRegistry

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.pb.decode_pb2 import CancelRequest, CancelResponse, StepTokens, TokensRequest
from halfmoon.pb.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from halfmoon.pb.gateway_pb2 import WorkerIdentity, WorkerLoad, WorkerMessage
from halfmoon.pb.gateway_pb2_grpc import ClusterStub
from halfmoon.pb.prefill_pb2 import FirstToken, PrefillEvent, PrefillRequest
from halfmoon.pb.prefill_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from halfmoon.pb.types_pb2 import BOTH, LENGTH, NOT_FINISHED, KVLayout, Token
from halfmoon.rpc.peer import LONG_LIVED_S, Peer
from halfmoon.rpc.server import running_server, until_told_to_stop
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics

TEXT = """Reading a prompt is bound by compute, writing the answer by memory bandwidth: on one device, each ruins the
other's latency. "Who waits, and for what?" asks the naïve user in Kraków; 4,096 tokens on, \\ and / still differ."""
_LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=64)
_HEARTBEAT_S = 0.5


@dataclass(slots=True)
class _Running:
    position: int
    max_tokens: int


class InstantWorker(PrefillServicer, DecodeServicer):
    """Owns the running requests."""

    def __init__(self, token_ids: list[int], step_s: float) -> None:
        self._token_ids = token_ids
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Event()

    async def Prefill(self, request: PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[PrefillEvent]:
        """Answers the first token at once."""
        generation = request.generation
        running = _Running(len(generation.output_token_ids), generation.sampling.max_tokens)
        token = self._next(generation.request_id, running)
        if token.finish_reason == NOT_FINISHED:
            self._running[generation.request_id] = running
            self._changed.set()
        yield PrefillEvent(first_token=FirstToken(token=token))

    async def Tokens(self, request: TokensRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[StepTokens]:
        """Streams messages with a token of every running request."""
        yield StepTokens()
        due_s = time.monotonic()
        while True:
            self._changed.clear()
            if not self._running:
                await self._changed.wait()
            due_s = max(due_s + self._step_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            yield self._step()

    async def Cancel(self, request: CancelRequest, context: grpc.aio.ServicerContext) -> CancelResponse:
        """Forgets requests."""
        removed = [self._running.pop(request_id, None) for request_id in request.request_ids]
        return CancelResponse(num_cancelled=sum(running is not None for running in removed))

    def _step(self) -> StepTokens:
        tokens = [self._next(request_id, running) for request_id, running in self._running.items()]
        for token in tokens:
            if token.finish_reason != NOT_FINISHED:
                del self._running[token.request_id]
        return StepTokens(tokens=tokens)

    def _next(self, request_id: str, running: _Running) -> Token:
        token_id = self._token_ids[running.position % len(self._token_ids)]
        token = Token(request_id=request_id, token_id=token_id, position=running.position)
        running.position += 1
        if running.position == running.max_tokens:
            token.finish_reason = LENGTH
        return token


async def serve(gateway: str, step_s: float, checkpoint: Checkpoint) -> None:
    """Serves until told to stop."""
    stop = asyncio.ensure_future(until_told_to_stop())
    worker = InstantWorker(Tokenizer(checkpoint).encode(TEXT), step_s)  # type: ignore[abstract] # keeps no answers
    add = [
        partial(add_service, worker) for add_service in (add_PrefillServicer_to_server, add_DecodeServicer_to_server)
    ]
    async with running_server("127.0.0.1:0", add, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        identity = _identity(checkpoint, f"127.0.0.1:{server.port}")
        registration = asyncio.ensure_future(_register(gateway, identity))
        await asyncio.wait({stop, registration}, return_when=asyncio.FIRST_COMPLETED)
        registration.cancel()
        with suppress(asyncio.CancelledError):
            await registration


async def _register(gateway: str, identity: WorkerIdentity) -> None:
    async def messages() -> AsyncIterator[WorkerMessage]:
        yield WorkerMessage(identity=identity)
        for sequence in itertools.count(1):
            yield WorkerMessage(load=WorkerLoad(sequence=sequence, free_blocks=identity.total_blocks))
            await asyncio.sleep(_HEARTBEAT_S)

    async with Peer(gateway) as peer:
        register = ClusterStub(peer.channel).Register
        async with peer.stream(register, messages(), deadline_s=LONG_LIVED_S) as answers:
            async for _ in answers:
                pass


def _identity(checkpoint: Checkpoint, address: str) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=f"instant-{os.getpid()}",
        role=BOTH,
        address=address,
        model=checkpoint.name,
        model_fingerprint=checkpoint.fingerprint,
        layout=_LAYOUT,
        context_tokens=checkpoint.context_tokens,
        total_blocks=1 << 20,
        version="0",
        device="none",
        pid=os.getpid(),
    )


def main() -> None:
    """Runs one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", required=True, help="host:port of the gateway's cluster service")
    parser.add_argument("--step-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.gateway, arguments.step_ms / 1000, prepare_checkpoint("demo")))


if __name__ == "__main__":
    main()
