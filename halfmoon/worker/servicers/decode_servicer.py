"""The decode phase of a worker: receives KV, adds the request to the batch, streams tokens to gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from halfmoon.errors import Incompatible, InvalidRequest, NotFound
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import QUANTISED
from halfmoon.kv.receiver import Commit, Effect, Reserve, Write, WriteFromDevice
from halfmoon.pb import decode_pb2, decode_pb2_grpc, types_pb2
from halfmoon.rpc.context import request_scope
from halfmoon.rpc.telemetry.spans import current_span
from halfmoon.rpc.transfer import KVIntake, parse_body
from halfmoon.rpc.transport.cuda_ipc import DeviceMemory
from halfmoon.rpc.transport.ranks import AwaitedParts, RankLinks
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.request_dropped import RequestDropped
from halfmoon.worker.servicers.wire import handover_tokens, request_from
from halfmoon.worker.serving_engine import ServingEngine
from halfmoon.worker.state import WorkerState, now_s

log = logging.getLogger(__name__)

LEASE_S = 10.0  # a reservation ends when its sender has been silent for this long
_MAX_TOKENS = 1_024  # in a message
RENEW_S = LEASE_S / 4  # how often a sender renews; receivers with another lease must allow for it


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """halfmoon.Decode and the receiving end of KV transfers."""

    def __init__(
        self,
        engine: ServingEngine,
        state: WorkerState,
        metrics: WorkerMetrics,
        lease_s: float = LEASE_S,
        device: DeviceMemory | None = None,
        ranks: RankLinks | None = None,
    ) -> None:
        self._engine = engine
        self._state = state
        self._metrics = metrics
        self._lease_s = lease_s
        self._intake = KVIntake(device=device, ranks=ranks)

    def close(self) -> None:
        """Detaches memory that KV senders share with this process."""
        self._intake.close()

    async def Tokens(
        self, request: decode_pb2.TokensRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepTokens]:
        """See decode.proto."""
        if not request.gateway_id:
            raise InvalidRequest("a token stream needs its gateway's id", param="gateway_id")
        async with aclosing(self._state.router.read(request.gateway_id)) as steps:
            async for step in steps:
                yield step

    async def Cancel(
        self, request: decode_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.CancelResponse:
        """See decode.proto."""
        cancelled = 0
        for request_id in request.request_ids:
            if self._state.router.belongs_to_another(request_id, request.gateway_id):
                continue
            self._state.remember_cancelled(request_id)
            self._state.router.forget(request_id)
            cancelled += await self._engine.cancel(request_id)
        return decode_pb2.CancelResponse(num_cancelled=cancelled)

    async def Settle(
        self, request: decode_pb2.SettleRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.SettleResponse:
        """See decode.proto."""
        router = self._state.router
        for request_id in request.request_ids:
            if not router.belongs_to_another(request_id, request.gateway_id):
                router.kept.settle(request_id, now_s())
                if router.forget(request_id):
                    await self._engine.cancel(request_id)
        return decode_pb2.SettleResponse()

    async def Find(self, request: decode_pb2.FindRequest, context: grpc.aio.ServicerContext) -> decode_pb2.FindResponse:
        """See decode.proto."""
        return decode_pb2.FindResponse(answers=self._state.router.kept.find(request.key))

    async def Adopt(
        self, request: decode_pb2.AdoptRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.AdoptedTokens]:
        """See decode.proto."""
        kept = self._state.router.adopt(request.request_id, request.gateway_id)
        log.info("request.adopted", extra={"request_id": request.request_id, "num_tokens": len(kept.tokens)})
        tokens, has_ended = list(kept.tokens), kept.ended_s is not None
        yield decode_pb2.AdoptedTokens(first=kept.first, has_ended=has_ended)
        for start in range(0, len(tokens), _MAX_TOKENS):
            yield decode_pb2.AdoptedTokens(tokens=tokens[start : start + _MAX_TOKENS])

    async def EmptyCache(
        self, request: decode_pb2.EmptyCacheRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.EmptyCacheResponse:
        """See decode.proto."""
        changes = await self._engine.forget_prefixes()
        self._state.cached_blocks.change(changes.stored, changes.evicted)
        num_left = self._engine.stats_now().num_cached_blocks
        log.info("cache.emptied", extra={"num_evicted": len(changes.evicted), "num_left": num_left})
        return decode_pb2.EmptyCacheResponse(num_left=num_left)

    async def push(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Receives one KV transfer: reserve, write, start. Whatever ends it before the start frees the reservation."""
        reception = _Reception(self._engine, self._state)
        try:
            answers = self._intake.receive(
                messages, self._state.layout, reception.act, self._lease_s, reception.dropped.event
            )
            with self._state.working():
                async with aclosing(answers):
                    async for answer in answers:
                        yield answer
        finally:
            self._metrics.handover_bytes.labels("in").inc(reception.num_bytes)
            await asyncio.shield(reception.close())


class _Reception:
    """Owns one incoming transfer's reservation until the request runs.

    `dropped` reports that the reservation was freed elsewhere: cancelling the request here also ends its transfer.
    """

    def __init__(self, engine: ServingEngine, state: WorkerState) -> None:
        self._engine = engine
        self._state = state
        self._generation = types_pb2.Generation()
        self._reserved = False
        self._held_tokens = 0
        self._is_rounded = False  # the sender's KV was quantised, and is not so here
        self._transfer = current_span()
        self.dropped = RequestDropped(engine)
        self.num_bytes = 0

    async def act(self, effect: Effect) -> int:
        """Does what one frame asks for; returns the tokens that a reservation found here, otherwise 0.

        Raises Cancelled when the reservation is gone.
        """
        try:
            return await self._act(effect)
        except NotFound:
            raise self.dropped.error() from None

    async def _act(self, effect: Effect) -> int:
        match effect:
            case Reserve(whole, body):
                return await self._reserve(whole, parse_body(decode_pb2.HandoverOpen, body))
            case Write(part, payload, codec, dtype):
                self._is_rounded |= dtype in QUANTISED and dtype != self._state.layout.dtype
                await self._engine.kv_write(self._generation.request_id, part.all_heads, payload, codec, dtype)
                self.num_bytes += memoryview(payload).nbytes
            case WriteFromDevice(part, source, dtype):
                if isinstance(source.cells, AwaitedParts):
                    source = await source.cells.brought(part, source.num_bytes)
                await self._engine.kv_write(self._generation.request_id, part.all_heads, source, dtype=dtype)
                self.num_bytes += source.num_bytes
            case Commit(body):
                await self._start(parse_body(decode_pb2.HandoverCommit, body))
        return 0

    async def close(self) -> None:
        """Frees the reservation if the request never started."""
        self.dropped.close()
        if self._reserved:
            await self._engine.cancel(self._generation.request_id)

    async def _reserve(self, whole: KVRange, opened: decode_pb2.HandoverOpen) -> int:
        generation, epoch = opened.generation, opened.role_epoch if opened.HasField("role_epoch") else None
        self._state.check_can_serve(generation, types_pb2.DECODE, epoch=epoch)
        self._state.router.check_listening(generation.gateway_id)
        layout = self._state.layout
        num_tokens = handover_tokens(generation, layout.block_tokens)
        if whole != KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, num_tokens):
            raise Incompatible(
                f"a hand-over must cover all {num_tokens} tokens that are kept, of all layers and heads, not {whole}"
            )
        request = request_from(generation, prefill_only=False, arrival_s=now_s())
        self._held_tokens = await self._engine.reserve(request, lambda _: self.dropped.notify())
        self._generation, self._reserved = generation, True
        self._state.check_not_cancelled(generation)
        return self._held_tokens

    async def _start(self, commit: decode_pb2.HandoverCommit) -> None:
        request_id = self._generation.request_id
        self._state.check_not_cancelled(self._generation)
        self._state.router.route_to_gateway(request_id, self._generation.gateway_id)
        self._state.router.trace_decoding(request_id, self._transfer)
        if commit.HasField("first"):
            self._state.router.keep(self._generation, commit.first)
        is_private = commit.is_private or self._is_rounded
        try:
            await self._engine.start(request_id, commit.first_token_id, is_private=is_private)
        except BaseException:
            self._state.router.forget(request_id)
            raise
        self._reserved = False
        with request_scope(request_id):
            log.info("request.decoding", extra={"kv_bytes": self.num_bytes, "held_tokens": self._held_tokens})
