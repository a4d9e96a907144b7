"""The prefill phase of a worker: computes a prompt, answers its first token, sends its KV to a decode worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import grpc

from halfmoon.background import cancelled, first_result, running
from halfmoon.errors import NoCapacity
from halfmoon.kv.codec import Codec
from halfmoon.pb import decode_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.telemetry.spans import current_span, operation
from halfmoon.rpc.transfer import TransferSender, transfer_to
from halfmoon.rpc.transport.estimate import LinkEstimate
from halfmoon.worker.handover.kv_channels import KVChannels
from halfmoon.worker.handover.layerwise_sender import LayerwiseSender
from halfmoon.worker.handover.link_codecs import LinkCodecs
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.decode_servicer import RENEW_S
from halfmoon.worker.servicers.prefill_request_scope import PrefillRequestScope
from halfmoon.worker.servicers.request_phases import Phase
from halfmoon.worker.servicers.wire import codec_from, handover_tokens, holders_from
from halfmoon.worker.serving_engine import ServingEngine
from halfmoon.worker.state import WorkerState, now_s
from halfmoon.worker.store.holder import NamedHolder
from halfmoon.worker.store.restorer import Restorer

log = logging.getLogger(__name__)

HANDOVER_DEADLINE_S = 3600.0  # an upper bound; the gateway's own deadline is what counts
_MOST_UNRESERVED_S = 0.05  # of computing before the decode worker has room: a refusal waits for the end of the step


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """halfmoon.Prefill. Owns the channels that carry KV to decode workers."""

    def __init__(
        self,
        engine: ServingEngine,
        state: WorkerState,
        metrics: WorkerMetrics,
        channels: KVChannels,
        restorer: Restorer | None = None,
    ) -> None:
        """`channels`: may be shared by several workers of one process.

        `restorer` loads known prefixes from a store, if there is one.
        """
        self._engine = engine
        self._state = state
        self._metrics = metrics
        self._restorer = restorer
        self._channels = channels
        self._codecs = (restorer and restorer.codecs) or LinkCodecs(state.layout)

    def links(self) -> dict[str, LinkEstimate]:
        """Measured speed of KV links, by the receiving worker's address."""
        return self._channels.estimates()

    async def close(self) -> None:
        """Closes the KV channels."""
        await self._channels.close_idle(0)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """See prefill.proto."""
        shares = request.shares if request.HasField("shares") else None
        keeping = () if request.decode_address or shares else (types_pb2.DECODE,)
        epoch = request.role_epoch if request.HasField("role_epoch") else None
        self._state.check_can_serve(request.generation, types_pb2.PREFILL, *keeping, epoch=epoch)
        sources = holders_from(request.sources)
        if request.is_copy:
            keeps_partial = request.keeps_partial and self._engine.keeps_partial_blocks
            events = self._first_only(request.generation, sources, is_copy=True, keeps_partial=keeps_partial)
        elif shares is not None and shares.own != (len(shares.segment_ends) - 1) % max(len(shares.addresses), 1):
            events = self._help(request.generation, shares)
        elif not request.decode_address:
            events = self._keep(request.generation, sources)
        elif _tokens_left(request.generation) <= 1:
            events = self._first_only(request.generation, sources, shares)
        else:
            events = self._hand_over(request, sources, shares)
        with self._state.working():
            async with aclosing(events):
                async for event in events:
                    yield event

    async def _first_only(
        self,
        generation: types_pb2.Generation,
        sources: Sequence[NamedHolder],
        shares: prefill_pb2.PromptShares | None = None,
        *,
        is_copy: bool = False,
        keeps_partial: bool = False,
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Serves a request for a single token, which never needs a decode worker; a copy needs its KV alone."""
        async with PrefillRequestScope(
            self._engine,
            self._state,
            generation,
            restorer=self._restorer,
            sources=sources,
            must_load=is_copy and not keeps_partial,
            keeps_partial=keeps_partial,
            shares=shares,
        ) as scope:
            yield scope.event(await first_result(scope.first, *scope.needed))

    async def _help(
        self, generation: types_pb2.Generation, shares: prefill_pb2.PromptShares
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Computes segments of a prompt that another worker serves, and keeps them for it until it needs no more."""
        async with PrefillRequestScope(
            self._engine, self._state, generation, restorer=self._restorer, shares=shares
        ) as scope:
            yield scope.event(await scope.first)
            await asyncio.Event().wait()  # the gateway cancels the call, or its connection ends

    async def _hand_over(
        self,
        request: prefill_pb2.PrefillRequest,
        sources: Sequence[NamedHolder],
        shares: prefill_pb2.PromptShares | None = None,
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Reserves on the decode worker, computes here while sending, then commits."""
        generation, address, wanted = request.generation, request.decode_address, codec_from(request.kv_codec)
        await self._state.decode_peers.check(address)
        layout = self._state.layout
        num_tokens = handover_tokens(generation, layout.block_tokens)
        epoch = request.decode_role_epoch if request.HasField("decode_role_epoch") else None
        body = decode_pb2.HandoverOpen(generation=generation, role_epoch=epoch).SerializeToString()
        await self._channels.close_idle(has_left=self._state.decode_peers.has_left)
        called_s = now_s()
        prefill = current_span()
        with operation(prefill.child("transfer", called_s)) as span, self._channels.to(address) as link:
            codec, reason = wanted, "configured"
            if request.chooses_codec:
                codec, reason = self._codecs.choose(link.raw_estimator, wanted)
            async with (
                transfer_to(link, layout, deadline_s=HANDOVER_DEADLINE_S) as transfer,
                self._opening(transfer, generation, body, num_tokens, codec) as (sender, opening),
                PrefillRequestScope(
                    self._engine,
                    self._state,
                    generation,
                    held_tokens=transfer.held_tokens,
                    on_kv=sender.on_kv,
                    restorer=self._restorer,
                    sources=sources,
                    shares=shares,
                    called_s=called_s,
                    span=prefill,
                ) as scope,
                running(_keep_lease(transfer, opening)) as lease,
                sender.running(opening) as sending,
            ):
                first = await first_result(scope.first, sending, lease, sender.dropped.event)
                opened_s = await first_result(opening, sender.dropped.event)
                event = scope.event(first)
                yield event
                if first.output.finish_reason is not None:
                    return
                await first_result(sending, lease, sender.dropped.event)
                await cancelled(lease)
                is_kept = generation.HasField("repeatable")
                commit = decode_pb2.HandoverCommit(
                    first_token_id=first.output.token_id,
                    first=event.first_token if is_kept else None,
                    is_private=request.is_degraded and not sender.codec.is_exact,
                )
                async with running(transfer.commit(commit.SerializeToString())) as done:
                    await first_result(done, sender.dropped.event)
                done_s = now_s()
            held_tokens = transfer.held_tokens
            phase = Phase("transfer", called_s, done_s, num_tokens - held_tokens, num_bytes=sender.num_bytes)
            phase.end(span)
        self._metrics.handover_codecs.labels(sender.codec.name.lower(), reason).inc()
        if sender.num_raw_bytes:
            self._codecs.note_ratio(sender.codec, sender.num_raw_bytes, sender.num_bytes)
        self._metrics.handover_tokens.labels("held").inc(held_tokens)
        self._metrics.handover_tokens.labels("sent").inc(num_tokens - held_tokens)
        self._note_handed_over(sender.num_bytes, done_s - min(opened_s, first.ended_s), done_s - first.ended_s)
        yield prefill_pb2.PrefillEvent(
            handed_over=prefill_pb2.HandedOver(
                kv_bytes=sender.num_bytes,
                transfer_s=done_s - first.ended_s,
                transfer=phase.message(called_s),
                held_tokens=held_tokens,
            )
        )

    @asynccontextmanager
    async def _opening(
        self, transfer: TransferSender, generation: types_pb2.Generation, body: bytes, num_tokens: int, codec: Codec
    ) -> AsyncIterator[tuple[LayerwiseSender, asyncio.Task[float]]]:
        """Opens the transfer while inside; the task returns when it was open. Raises the decode worker's refusal.

        A prompt that is computed soon is entered at once: its step is for nothing if the decode worker refuses. Others
        are entered when the transfer is open.
        """
        sender = LayerwiseSender(self._engine, transfer, self._state.layout, generation.request_id, num_tokens, codec)

        async def opened() -> float:
            await sender.open(body)
            self._state.check_not_cancelled(generation)
            return now_s()

        async with running(opened()) as opening:
            if self._state.compute_rate.model.seconds(num_tokens) > _MOST_UNRESERVED_S:
                await opening
            yield sender, opening

    def _note_handed_over(self, num_bytes: int, transfer_s: float, exposed_s: float) -> None:
        self._metrics.handover_bytes.labels("out").inc(num_bytes)
        self._metrics.handover_seconds.observe(transfer_s)
        self._metrics.handover_exposed_seconds.observe(exposed_s)
        log.info(
            "request.handed_over",
            extra={"kv_bytes": num_bytes, "transfer_s": round(transfer_s, 4), "exposed_s": round(exposed_s, 4)},
        )

    async def _keep(
        self, generation: types_pb2.Generation, sources: Sequence[NamedHolder]
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Keeps the request here (a worker that decodes); further tokens go to the gateway's token stream."""
        self._state.router.check_listening(generation.gateway_id)
        if self._state.role.role == types_pb2.DECODE:
            self._check_room(generation)
        async with PrefillRequestScope(
            self._engine, self._state, generation, prefill_only=False, restorer=self._restorer, sources=sources
        ) as scope:
            first = await scope.first
            yield scope.event(first)
            scope.detach()
            self._state.router.trace_decoding(generation.request_id, current_span())
        if first.output.finish_reason is None:
            yield prefill_pb2.PrefillEvent(handed_over=prefill_pb2.HandedOver())

    def _check_room(self, generation: types_pb2.Generation) -> None:
        """Raises NoCapacity if a prompt might wait here: hand-overs would be refused as long as it does."""
        stats = self._engine.stats_now()
        num_tokens = len(generation.prompt_token_ids) + len(generation.output_token_ids)
        num_tokens += stats.num_waiting_tokens if stats.num_waiting else 0
        num_requests = stats.num_running + stats.num_waiting + stats.num_paused + stats.num_reserved
        num_blocks = -(-(num_tokens + 1) // self._state.layout.block_tokens)
        if 0 < self._state.identity.max_running <= num_requests or num_blocks > stats.num_free_blocks:
            raise NoCapacity("this decode worker has no room for another prompt now")


async def _keep_lease(transfer: TransferSender, opening: asyncio.Future[float]) -> None:
    """Renews the decode worker's reservation until it is lost, then raises the reason."""
    await asyncio.shield(opening)
    async with running(transfer.until_broken()) as broken:
        while True:
            done, _ = await asyncio.wait({broken}, timeout=RENEW_S)
            if done:
                await broken
            await transfer.renew()


def _tokens_left(generation: types_pb2.Generation) -> int:
    return generation.sampling.max_tokens - len(generation.output_token_ids)
