"""KV transfers over a raw-bytes gRPC stream: the sender's side, and the handler's shape for the receiver's.

One bidirectional call a transfer, on a channel of its own. The law of the frames is `kv.receiver`; this is its shell.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from halfmoon.errors import DeadlineExceeded, Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame
from halfmoon.kv.layout import KVBytes, KVLayout
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.status import error_from, in_our_tree

KV_TRANSFER = "halfmoon.KVTransfer"
PUSH = "Push"

Body = TypeVar("Body", bound=Message)

RawHandler = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], AsyncIterator[bytes]]


def raw_service(service: str, handlers: dict[str, RawHandler]) -> Callable[[grpc.aio.Server], None]:
    """Adds bidirectional methods whose messages are bytes, without a serializer between."""

    def add(server: grpc.aio.Server) -> None:
        methods = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in handlers.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

    return add


class TransferSender:
    """Owns the sending end of one transfer: sequence numbers and the stream. Knows nothing of where KV is kept."""

    def __init__(self, call: grpc.aio.StreamStreamCall, address: str, layout: KVLayout) -> None:
        self._call = call
        self._address = address
        self._fingerprint = layout.fingerprint()
        self._transfer_id = os.urandom(16)
        self._sequence = 0
        self._lock = asyncio.Lock()

    async def open(self, whole: KVRange, body: bytes) -> None:
        """Reserves room; returns when the receiver accepted. Raises what it refused with."""
        await self._send(FrameKind.OPEN, whole, body)
        await self._expect(FrameKind.ACCEPT)

    async def renew(self) -> None:
        """Keeps the reservation while there is nothing to send."""
        await self._send(FrameKind.RENEW, KVRange(), b"")

    async def data(self, part: KVRange, payload: KVBytes) -> None:
        """Sends KV bytes; waits while the receiver is behind."""
        await self._send(FrameKind.DATA, part, payload)

    async def commit(self, body: bytes) -> None:
        """Says that all was sent; returns when the receiver has acted on `body`."""
        await self._send(FrameKind.COMMIT, KVRange(), body)
        await self._expect(FrameKind.DONE)

    async def until_broken(self) -> None:
        """Returns never; raises as soon as the receiver ends the call. For while nothing is being sent."""
        raise await self._failure(await self._call.code())

    async def _send(self, kind: FrameKind, part: KVRange, payload: KVBytes) -> None:
        async with self._lock:
            frame = Frame(kind, self._transfer_id, self._fingerprint, self._sequence, part, payload=payload)
            self._sequence += 1
            try:
                with in_our_tree(self._address):
                    await self._call.write(encode_frame(frame))
            except asyncio.InvalidStateError:
                raise await self._failure(await self._call.code()) from None

    async def _expect(self, kind: FrameKind) -> None:
        with in_our_tree(self._address):
            answer = await self._call.read()
        if answer is grpc.aio.EOF:
            raise await self._failure(await self._call.code())
        frame = decode_frame(answer)
        if frame.kind is not kind or frame.transfer_id != self._transfer_id:
            raise Incompatible(f"the receiver answered {frame.kind.name} where {kind.name} was due")

    async def _failure(self, code: grpc.StatusCode) -> Exception:
        if code is grpc.StatusCode.OK:
            return Unavailable("the receiver ended the KV transfer early")
        return error_from(
            grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )
        )


@asynccontextmanager
async def transfer_to(
    peer: Peer, layout: KVLayout, *, deadline_s: float, method: str = f"/{KV_TRANSFER}/{PUSH}"
) -> AsyncIterator[TransferSender]:
    """A transfer to `peer`. Leaving the block before `commit` returned frees what the receiver reserved."""
    call = peer.raw_stream(method, deadline_s=deadline_s)
    try:
        yield TransferSender(call, peer.address, layout)
    finally:
        call.cancel()


async def next_message(messages: AsyncIterator[bytes], lease_s: float) -> bytes | None:
    """The sender's next message, None after its last. Raises DeadlineExceeded after `lease_s` of silence."""
    try:
        async with asyncio.timeout(lease_s):
            return await anext(messages)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise DeadlineExceeded(f"the sender was silent for {lease_s:g} s: its reservation expired") from None
    except grpc.aio.UsageError as err:
        raise Unavailable("the sender went away") from err


def parse_body(message_class: type[Body], body: KVBytes) -> Body:
    """The protobuf body of a control frame. Raises InvalidRequest if it is something else."""
    try:
        return message_class.FromString(bytes(body))
    except DecodeError as err:
        raise InvalidRequest(f"the body of a frame is not the {message_class.__name__} it must be") from err


def answer(to: Frame, kind: FrameKind, sequence: int) -> bytes:
    """The receiver's ACCEPT or DONE."""
    return encode_frame(Frame(kind, to.transfer_id, to.layout_fingerprint, sequence))
