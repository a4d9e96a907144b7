"""The store on the wire: halfmoon.KVStore, and block bytes as raw frames on halfmoon.KVStoreBytes/{Put,Get}.

A Put's OPEN body names the block's layout, so one store serves workers of any model; the frames that follow must
carry that layout's fingerprint. kvstore.proto states both exchanges.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import grpc

from halfmoon.errors import Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame, plan_frames
from halfmoon.kv.layout import KVLayout, Shard
from halfmoon.kv.negotiation import INLINE, Choice, decode_open
from halfmoon.kv.receiver import Commit, Reserve, TransferReceiver, Write
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc, types_pb2
from halfmoon.rpc.transfer import next_message, parse_body, raw_service
from services.kvstore.store import BlockStore, Draft

BYTES_SERVICE = "halfmoon.KVStoreBytes"


class KVStoreServicer(kvstore_pb2_grpc.KVStoreServicer):
    """Translates between the wire and a `BlockStore`. Everything runs on the event loop: the store needs no locks."""

    def __init__(self, store: BlockStore, lease_s: float = 10.0) -> None:
        self._store = store
        self._lease_s = lease_s

    def registrations(self) -> Sequence[Callable[[grpc.aio.Server], None]]:
        """What adds the control and the bytes methods to a server."""
        return (
            lambda server: kvstore_pb2_grpc.add_KVStoreServicer_to_server(self, server),
            raw_service(BYTES_SERVICE, {"Put": self.put, "Get": self.get}),
        )

    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.MatchResponse:
        """See kvstore.proto."""
        return kvstore_pb2.MatchResponse(num_matched=self._store.match(request.keys))

    async def Delete(
        self, request: kvstore_pb2.DeleteRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.DeleteResponse:
        """See kvstore.proto."""
        return kvstore_pb2.DeleteResponse(num_deleted=self._store.delete(request.keys))

    async def Stats(
        self, request: kvstore_pb2.StatsRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.StatsResponse:
        """See kvstore.proto."""
        stats = self._store.stats()
        fields = kvstore_pb2.StatsResponse.DESCRIPTOR.fields_by_name
        return kvstore_pb2.StatsResponse(**{name: getattr(stats, name) for name in fields})

    async def put(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """One block in. Whatever ends the stream before COMMIT frees the block's room."""
        frame = decode_frame(await _next(messages, self._lease_s))
        reception = _Reception(self._store, _layout_of(frame))
        try:
            while True:
                answer = reception.handle(frame)
                if answer is not None:
                    yield encode_frame(answer)
                    if answer.kind is FrameKind.DONE:
                        return
                frame = decode_frame(await _next(messages, self._lease_s))
        finally:
            reception.close()

    async def get(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """One block out: DATA frames that cover the range of the OPEN, then DONE."""
        request = decode_frame(await _next(messages, self._lease_s))
        block = self._store.get(_opened(request).key)
        layout, wanted = block.layout, request.range
        if request.layout_fingerprint != layout.fingerprint():
            raise Incompatible("the stored block has another KV layout than its reader")
        wanted.check_within(_whole_block(layout, wanted.token_start))
        shard = Shard(wanted.layer_start, wanted.layer_end, wanted.head_start, wanted.head_end)
        sequence = 0
        for part in plan_frames(layout, shard, wanted.token_start, wanted.num_tokens):
            payload = block.part(replace(part, token_start=part.token_start - wanted.token_start))
            yield encode_frame(
                Frame(FrameKind.DATA, request.transfer_id, request.layout_fingerprint, sequence, part, payload=payload)
            )
            sequence += 1
        yield encode_frame(Frame(FrameKind.DONE, request.transfer_id, request.layout_fingerprint, sequence))


class _Reception:
    """Owns one incoming block's draft until it is committed."""

    def __init__(self, store: BlockStore, layout: KVLayout) -> None:
        self._store = store
        self._layout = layout
        self._receiver = TransferReceiver(layout)
        self._draft: Draft | None = None
        self._token_start = 0

    def handle(self, frame: Frame) -> Frame | None:
        """Acts on one frame; gives the answer that is due, if any."""
        effect = self._receiver.handle(frame)
        if isinstance(effect, Reserve):
            if effect.range != _whole_block(self._layout, effect.range.token_start):
                raise InvalidRequest(f"a stored block is whole: all layers, heads and tokens, not {effect.range}")
            self._token_start = effect.range.token_start
            self._draft = self._store.reserve(_opened(frame).key, self._layout)
            return self._receiver.accept(Choice(INLINE))
        assert self._draft is not None, "the receiver lets nothing but OPEN come first"
        if isinstance(effect, Write):
            if (effect.codec, effect.dtype) != (Codec.RAW, self._layout.dtype):
                raise Incompatible("a stored block is raw and of its layout's dtype")
            part = replace(effect.range, token_start=effect.range.token_start - self._token_start)
            self._draft.write(part, effect.payload)
            return self._receiver.credit(frame.sequence)
        if isinstance(effect, Commit):
            self._store.commit(self._draft)
            return self._receiver.done()
        return None

    def close(self) -> None:
        """Frees the draft if it was not committed."""
        if self._draft is not None:
            self._store.discard(self._draft)


def _whole_block(layout: KVLayout, token_start: int) -> KVRange:
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, token_start, layout.block_tokens)


def _opened(frame: Frame) -> kvstore_pb2.BlockOpen:
    if frame.kind is not FrameKind.OPEN:
        raise InvalidRequest(f"the first frame must be OPEN, not {frame.kind.name}")
    _, body = decode_open(frame.payload)
    return parse_body(kvstore_pb2.BlockOpen, body)


def _layout_of(frame: Frame) -> KVLayout:
    message = _opened(frame).layout
    if message == types_pb2.KVLayout():
        raise InvalidRequest("a Put must name its block's layout", param="layout")
    return KVLayout(
        message.num_layers,
        message.num_kv_heads,
        message.head_dim,
        message.dtype,  # type: ignore[arg-type]  # KVLayout refuses what is not a KVDtype
        message.block_tokens,
    )


async def _next(messages: AsyncIterator[bytes], lease_s: float) -> bytes:
    """The next message. Raises DeadlineExceeded after `lease_s` of silence, Unavailable if the sender is gone."""
    message = await next_message(messages, lease_s)
    if message is None:
        raise Unavailable("the sender ended the stream before its COMMIT")
    return message
