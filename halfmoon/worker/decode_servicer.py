"""The decode half of a worker: takes KV in, joins the request to the batch, streams tokens to gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame
from halfmoon.kv.receiver import Commit, Reserve, TransferReceiver, Write
from halfmoon.pb import decode_pb2, decode_pb2_grpc, types_pb2
from halfmoon.rpc.context import request_scope
from halfmoon.rpc.transfer import answer, next_message, parse_body
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.state import WorkerState, now_s
from halfmoon.worker.wire import request_from

log = logging.getLogger(__name__)

LEASE_S = 10.0  # a reservation ends when its sender is silent for this long
RENEW_S = LEASE_S / 4  # a sender's rhythm; receivers with another lease must allow for it


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """halfmoon.Decode and the receiving end of KV transfers."""

    def __init__(
        self, engine: AsyncEngine, state: WorkerState, metrics: WorkerMetrics, lease_s: float = LEASE_S
    ) -> None:
        self._engine = engine
        self._state = state
        self._metrics = metrics
        self._lease_s = lease_s

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
            self._state.remember_cancelled(request_id)
            self._state.router.forget(request_id)
            cancelled += await self._engine.cancel(request_id)
        return decode_pb2.CancelResponse(num_cancelled=cancelled)

    async def push(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """One KV transfer: reserve, write, start. Whatever ends it before the start frees the reservation."""
        reception = _Reception(self._engine, self._state)
        try:
            while (message := await next_message(messages, self._lease_s)) is not None:
                frame = decode_frame(message)
                reply = await reception.handle(frame)
                if reply is not None:
                    yield answer(frame, reply, reception.next_sequence())
        finally:
            self._metrics.handover_bytes.labels("in").inc(reception.num_bytes)
            await asyncio.shield(reception.close())


class _Reception:
    """Owns one incoming transfer's reservation until the request runs."""

    def __init__(self, engine: AsyncEngine, state: WorkerState) -> None:
        self._engine = engine
        self._state = state
        self._receiver = TransferReceiver(state.layout)
        self._generation = types_pb2.Generation()
        self._reserved = False
        self._num_answers = 0
        self.num_bytes = 0

    async def handle(self, frame: Frame) -> FrameKind | None:
        """Acts on one frame; gives the answer that is due, if any."""
        match self._receiver.handle(frame):
            case Reserve(whole, body):
                await self._reserve(whole, parse_body(decode_pb2.HandoverOpen, body).generation)
                return FrameKind.ACCEPT
            case Write(part, payload):
                await self._engine.kv_write(
                    self._generation.request_id,
                    part.layer_start,
                    part.layer_end,
                    part.token_start,
                    part.num_tokens,
                    payload,
                )
                self.num_bytes += memoryview(payload).nbytes
            case Commit(body):
                await self._start(parse_body(decode_pb2.HandoverCommit, body).first_token_id)
                return FrameKind.DONE
        return None

    def next_sequence(self) -> int:
        """Sequence number of the next answer."""
        self._num_answers += 1
        return self._num_answers - 1

    async def close(self) -> None:
        """Frees the reservation if the request never started."""
        if self._reserved:
            await self._engine.cancel(self._generation.request_id)

    async def _reserve(self, whole: KVRange, generation: types_pb2.Generation) -> None:
        self._state.check_can_serve(generation, types_pb2.DECODE)
        self._state.router.check_listening(generation.gateway_id)
        layout = self._state.layout
        num_tokens = len(generation.prompt_token_ids) + len(generation.output_token_ids)
        if whole != KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, num_tokens):
            raise Incompatible(f"a hand-over must cover all {num_tokens} tokens of all layers and heads, not {whole}")
        await self._engine.reserve(request_from(generation, prefill_only=False, arrival_s=now_s()))
        self._generation, self._reserved = generation, True

    async def _start(self, first_token_id: int) -> None:
        request_id = self._generation.request_id
        self._state.check_can_serve(self._generation, types_pb2.DECODE)
        self._state.router.route_to_gateway(request_id, self._generation.gateway_id)
        try:
            await self._engine.start(request_id, first_token_id)
        except BaseException:
            self._state.router.forget(request_id)
            raise
        self._reserved = False
        with request_scope(request_id):
            log.info("request.decoding", extra={"kv_bytes": self.num_bytes})
