"""The reader's end of a Get: blocks as they arrive, checked, and how fast they came."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import DataLoss, HalfmoonError, InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.codec import Codec, check_size, decode
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import encode_open
from halfmoon.kv.receiver import Coverage
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.status import in_our_tree
from halfmoon.rpc.store.block_streams import BYTES_SERVICE
from halfmoon.rpc.transport.estimate import LinkEstimator
from halfmoon.rpc.transport.link import KVLink

_GET = f"/{BYTES_SERVICE}/Get"
_TRANSFER_ID = bytes(16)  # the stream of a Get carries one transfer

Arrival = Callable[[int], Awaitable[None]]
"""Returns when that many bytes would have arrived over a link that is limited."""


class Sizes(NamedTuple):
    """How large some KV was."""

    raw_bytes: int = 0
    encoded_bytes: int = 0  # as it travelled


class InboundSpeed:
    """Owns how fast what Gets ask for has come over one link, and how small it was."""

    def __init__(self) -> None:
        self.estimators: defaultdict[Codec, LinkEstimator] = defaultdict(LinkEstimator)  # of raw bytes, by codec
        self._sizes: defaultdict[Codec, Sizes] = defaultdict(Sizes)

    def came(self, codec: Codec, raw_bytes: int, encoded_bytes: int) -> None:
        """Notes a frame of a Get that asked for `codec`."""
        before = self._sizes[codec]
        self._sizes[codec] = Sizes(before.raw_bytes + raw_bytes, before.encoded_bytes + encoded_bytes)

    def take_sizes(self) -> dict[Codec, Sizes]:
        """What has come since the last call, by codec."""
        sizes = dict(self._sizes)
        self._sizes.clear()
        return sizes


class BlockGet:
    """Owns the call of one Get, and what of it is still to come."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        link: KVLink,
        layout: KVLayout,
        codec: Codec,
        arrival: Arrival,
        inbound: InboundSpeed,
    ) -> None:
        self._call = call
        self._link = link
        self._layout = layout
        self._codec = codec
        self._arrival = arrival
        self._inbound = inbound
        self._estimator = inbound.estimators[codec]
        self._left_bytes = 0

    async def ask(self, opening: Frame, num_bytes: int) -> None:
        """Sends the request, which is for so many raw bytes."""
        with in_our_tree(self._link.peer.address):
            await _send(self._call, encode_frame(opening))
        self._left_bytes = num_bytes
        self._estimator.sent(num_bytes, self._link.clock.time())

    async def num_served(self, num_asked: int) -> int:
        """How many of the blocks will come, which a holder says first if it is asked by layer. Raises DataLoss."""
        frame = await self._frame()
        if frame is None or frame.kind is not FrameKind.ACCEPT or not 0 < frame.sequence <= num_asked:
            raise DataLoss("a Get by layer was not answered with the number of blocks that come")
        self.withdraw(self._left_bytes // num_asked * (num_asked - frame.sequence))
        return frame.sequence

    async def next(self, wanted: KVRange) -> memoryview | None:
        """The next block, or part of one, as raw bytes in canonical order; None after the last one. Raises DataLoss."""
        out: NDArray[np.uint8] | None = None
        coverage = Coverage(wanted)
        while not coverage.is_whole():
            frame = await self._frame()
            if frame is None or frame.kind is FrameKind.DONE:
                if frame is None or out is not None:
                    raise DataLoss("the store sent only a part of the block")
                self.withdraw(self._left_bytes)
                return None
            if out is None:
                out = np.empty((*wanted.shape(self._layout)[:-1], self._layout.row_bytes), np.uint8)
            _check(frame, self._layout, self._codec, coverage)
            into = out[frame.range.within(wanted).slices]
            await self._arrival(frame.payload_bytes)
            payload = frame.payload if frame.codec is Codec.RAW else await _decoded(frame, self._layout)
            np.copyto(into, np.frombuffer(payload, np.uint8).reshape(into.shape))
            self._inbound.came(self._codec, into.nbytes, frame.payload_bytes)
        assert out is not None, "no block is empty"
        self._left_bytes -= out.nbytes
        self._estimator.consumed(out.nbytes, self._link.clock.time())
        return memoryview(out.reshape(-1).data)

    def withdraw(self, num_bytes: int | None = None) -> None:
        """Notes that the holder will not send so many bytes, or nothing more."""
        num_bytes = self._left_bytes if num_bytes is None else num_bytes
        self._left_bytes -= num_bytes
        self._estimator.withdrawn(num_bytes, self._link.clock.time())

    def end(self) -> None:
        """Ends the call. What is on its way is lost."""
        self._call.cancel()
        if self._left_bytes:
            self._estimator.lost(self._left_bytes, self._link.clock.time())

    async def _frame(self) -> Frame | None:
        with in_our_tree(self._link.peer.address):
            message = await self._call.read()
        return None if message is grpc.aio.EOF else decode_frame(message)


@asynccontextmanager
async def block_get(
    link: KVLink,
    opened: kvstore_pb2.BlocksOpen,
    layout: KVLayout,
    wanted: KVRange,
    arrival: Arrival,
    inbound: InboundSpeed,
    *,
    deadline_s: float,
) -> AsyncIterator[BlockGet]:
    """Asks for the range `wanted` of each of the opened blocks. Leaving ends the call."""
    payload = encode_open((), opened.SerializeToString())
    opening = Frame(FrameKind.OPEN, _TRANSFER_ID, layout.fingerprint(), 0, wanted, payload=payload)
    call = link.peer.raw_stream(_GET, deadline_s=deadline_s)
    get = BlockGet(call, link, layout, Codec(opened.codec), arrival, inbound)
    try:
        await get.ask(opening, len(opened.keys) * wanted.num_bytes(layout))
        yield get
    except (NotFound, NoCapacity):  # nothing is on its way
        get.withdraw()
        raise
    finally:
        get.end()


def _check(frame: Frame, layout: KVLayout, codec: Codec, coverage: Coverage) -> None:
    """Raises DataLoss unless the frame carries KV that is due, in this layout, raw or in `codec`."""
    is_asked_for = frame.kind is FrameKind.DATA and frame.codec in (Codec.RAW, codec)
    try:
        if is_asked_for and frame.layout_fingerprint == layout.fingerprint():
            coverage.add(frame.range)
            check_size(frame.codec, frame.payload_bytes, frame.range.shape(layout), layout.dtype)
            return
    except InvalidRequest:
        pass
    raise DataLoss("a block came in another layout, encoding or size than it was asked for")


async def _decoded(frame: Frame, layout: KVLayout) -> memoryview:
    """The raw bytes of a compressed frame. Raises DataLoss if they are no encoding."""
    shape = frame.range.shape(layout)
    try:
        bits = await asyncio.to_thread(decode, frame.codec, frame.payload, shape, layout.dtype)
    except HalfmoonError as error:
        raise DataLoss(f"a block came damaged: {error.message}") from error
    return bits.reshape(-1).view(np.uint8).data


async def _send(call: grpc.aio.StreamStreamCall, message: bytes) -> None:
    try:
        await call.write(message)
        await call.done_writing()
    except asyncio.InvalidStateError:  # the store has already refused: reading says why
        return
