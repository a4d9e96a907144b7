"""The prefill half of a worker: computes a prompt, answers its first token, sends its KV to a decode worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.errors import HalfmoonError
from halfmoon.kv.frame import KVRange, plan_frames
from halfmoon.pb import decode_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.transfer import TransferSender, transfer_to
from halfmoon.worker.decode_servicer import RENEW_S
from halfmoon.worker.kv_channels import KVChannels
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.state import WorkerState, now_s
from halfmoon.worker.token_router import FirstOutput
from halfmoon.worker.wire import request_from, token_message

log = logging.getLogger(__name__)

HANDOVER_DEADLINE_S = 3600.0  # an upper bound; the gateway's own deadline is the one that counts


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """halfmoon.Prefill. Owns the channels that carry KV to decode workers."""

    def __init__(self, engine: AsyncEngine, state: WorkerState, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._state = state
        self._metrics = metrics
        self._channels = KVChannels()

    async def close(self) -> None:
        """Closes the KV channels."""
        await self._channels.close_idle(0)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """See prefill.proto."""
        self._state.check_can_serve(request.generation, types_pb2.PREFILL)
        if not request.decode_address:
            events = self._keep(request.generation)
        elif _tokens_left(request.generation) <= 1:
            events = self._first_only(request.generation)
        else:
            events = self._hand_over(request.generation, request.decode_address)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _first_only(self, generation: types_pb2.Generation) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """A request for a single token never needs a decode worker."""
        async with _Prefilling(self._engine, self._state, generation) as prefilling:
            yield prefilling.event(await prefilling.first)

    async def _hand_over(
        self, generation: types_pb2.Generation, address: str
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Reserve there, compute here, send, commit."""
        layout = self._state.layout
        num_tokens = len(generation.prompt_token_ids) + len(generation.output_token_ids)
        whole = KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, num_tokens)
        body = decode_pb2.HandoverOpen(generation=generation).SerializeToString()
        await self._channels.close_idle()
        with self._channels.to(address) as link:
            async with transfer_to(link, layout, deadline_s=HANDOVER_DEADLINE_S) as transfer:
                await transfer.open(whole, body)
                async with _Prefilling(self._engine, self._state, generation) as prefilling:
                    first = await _while_renewing(prefilling.first, transfer)
                    yield prefilling.event(first)
                    if first.output.finish_reason is not None:
                        return
                    started_s = now_s()
                    num_bytes = await self._send_kv(transfer, generation.request_id, num_tokens)
                    commit = decode_pb2.HandoverCommit(first_token_id=first.output.token_id)
                    await transfer.commit(commit.SerializeToString())
        transfer_s = now_s() - started_s
        self._metrics.handover_seconds.observe(transfer_s)
        log.info("request.handed_over", extra={"kv_bytes": num_bytes, "transfer_s": round(transfer_s, 4)})
        yield prefill_pb2.PrefillEvent(handed_over=prefill_pb2.HandedOver(kv_bytes=num_bytes, transfer_s=transfer_s))

    async def _keep(self, generation: types_pb2.Generation) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Role "both": the request goes on here, its further tokens on the gateway's token stream."""
        self._state.router.check_listening(generation.gateway_id)
        async with _Prefilling(self._engine, self._state, generation, prefill_only=False) as prefilling:
            first = await prefilling.first
            yield prefilling.event(first)
            prefilling.let_go()
        if first.output.finish_reason is None:
            yield prefill_pb2.PrefillEvent(handed_over=prefill_pb2.HandedOver())

    async def _send_kv(self, transfer: TransferSender, request_id: str, num_tokens: int) -> int:
        layout = self._state.layout
        num_bytes = 0
        for part in plan_frames(layout, layout.whole(), 0, num_tokens):
            payload = await self._engine.kv_read(
                request_id, part.layer_start, part.layer_end, part.token_start, part.num_tokens
            )
            await transfer.data(part, payload)
            num_bytes += part.num_bytes(layout)
        self._metrics.handover_bytes.labels("out").inc(num_bytes)
        return num_bytes


class _Prefilling:
    """Owns one request in the engine from its arrival until its KV is elsewhere, or it is let go."""

    def __init__(
        self, engine: AsyncEngine, state: WorkerState, generation: types_pb2.Generation, *, prefill_only: bool = True
    ) -> None:
        self._engine = engine
        self._state = state
        self._arrival_s = now_s()
        self._request = request_from(generation, prefill_only=prefill_only, arrival_s=self._arrival_s)
        self._kept = True
        self.first: asyncio.Future[FirstOutput] = state.router.expect_first(
            generation.request_id, generation.gateway_id
        )

    async def __aenter__(self) -> _Prefilling:
        try:
            await self._engine.add(self._request)
        except BaseException:
            self.first.cancel()
            self._state.router.forget(self._request.request_id)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._kept:
            self.first.cancel()
            self._state.router.forget(self._request.request_id)
            await asyncio.shield(self._engine.cancel(self._request.request_id))

    def let_go(self) -> None:
        """The request stays in the engine and goes on without this call."""
        self._kept = False

    def event(self, first: FirstOutput) -> prefill_pb2.PrefillEvent:
        """The gateway's FirstToken."""
        if first.output.finish_reason == "error":
            raise HalfmoonError("the worker failed while computing this prompt: see its log")
        return prefill_pb2.PrefillEvent(
            first_token=prefill_pb2.FirstToken(
                token=token_message(first.output),
                num_cached_tokens=first.num_cached_tokens,
                queue_s=max(0.0, first.began_s - self._arrival_s),
                compute_s=now_s() - first.began_s,
            )
        )


async def _while_renewing(first: asyncio.Future[FirstOutput], transfer: TransferSender) -> FirstOutput:
    """Waits for the first token while the decode worker's reservation is kept; raises when that is lost."""
    broken = asyncio.ensure_future(transfer.until_broken())
    either: set[asyncio.Future[Any]] = {first, broken}
    try:
        while not first.done():
            done, _ = await asyncio.wait(either, timeout=RENEW_S, return_when=asyncio.FIRST_COMPLETED)
            if broken in done:
                await broken
            if not done:
                await transfer.renew()
        return first.result()
    finally:
        broken.cancel()


def _tokens_left(generation: types_pb2.Generation) -> int:
    return generation.sampling.max_tokens - len(generation.output_token_ids)
