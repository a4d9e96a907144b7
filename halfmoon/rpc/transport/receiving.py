"""Incoming KV transfers: frames from the stream, payloads from wherever they lie, answers back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from halfmoon.errors import DataLoss, DeadlineExceeded, HalfmoonError, Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.codec import decodable
from halfmoon.kv.frame import Elsewhere, Frame, FrameKind, decode_message, encode_frame
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.kv.negotiation import INLINE, Acceptance, Offer
from halfmoon.kv.receiver import Commit, Effect, Reserve, TransferReceiver, Write, WriteFromDevice
from halfmoon.rpc.transport.cuda_ipc import CudaIpcInlet, DeviceMemory
from halfmoon.rpc.transport.nixl import NixlInlet
from halfmoon.rpc.transport.protocol import Inlet, Source
from halfmoon.rpc.transport.ranks import RankLinks
from halfmoon.rpc.transport.shm import SharedMemoryInlet

Body = TypeVar("Body", bound=Message)
Received = TypeVar("Received")


_CREDIT_BYTES = 2 << 20  # a message costs as much as copying some hundred KiB, so credits are collected


class KVIntake:
    """Owns what the incoming transfers of a process share: the joined transports, and the ids of running transfers."""

    def __init__(
        self,
        inlets: Sequence[Inlet] | None = None,
        device: DeviceMemory | None = None,
        ranks: RankLinks | None = None,
    ) -> None:
        """`cuda_ipc` needs `device`, `ranks` a worker of several; without, or with custom `inlets`, it is declined."""
        everywhere: list[Inlet] = [SharedMemoryInlet(), NixlInlet()]
        if device is not None:
            everywhere.append(CudaIpcInlet(device))
        if ranks is not None:
            everywhere.append(ranks)
        self._inlets = {inlet.name: inlet for inlet in (everywhere if inlets is None else inlets)}
        self._running: set[bytes] = set()
        self._codecs = decodable()

    async def receive(
        self,
        messages: AsyncIterator[bytes],
        layout: KVLayout,
        act: Callable[[Effect], Awaitable[int | None]],
        lease_s: float,
        aborted: asyncio.Future[None] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Runs one transfer: carries out each effect through `act`, and yields the answers to send.

        For `Reserve`, `act` returns how many leading tokens are here already: they are not sent. `act` must be done
        with a payload when it returns: then its room is returned. Raises what the frames are rejected with, what `act`
        raises, what `aborted` raises while no frame arrives, and DeadlineExceeded after `lease_s` of silence.
        """
        receiver = TransferReceiver(layout)
        source: Source | None = None
        consumed: list[int] = []  # not credited yet
        consumed_bytes = 0
        mine = b""
        reading = _Reading(messages, lease_s, aborted)
        try:
            while (message := await reading.next()) is not None:
                arrived_s = time.monotonic()
                arrived = decode_message(message)
                frame = await _whole(arrived, source)
                effect = receiver.handle(frame)
                if isinstance(effect, Reserve):
                    mine = self._begin(frame.transfer_id)
                held_tokens = None
                if effect is not None:
                    held_tokens = await act(effect)
                    _check_intact(arrived, source)
                if isinstance(effect, Write | WriteFromDevice):
                    consumed.append(frame.sequence)
                    consumed_bytes += frame.payload_bytes
                if consumed and (
                    not reading.has_next or consumed_bytes >= _CREDIT_BYTES or frame.kind is FrameKind.COMMIT
                ):
                    yield encode_frame(receiver.credit(*consumed))
                    consumed, consumed_bytes = [], 0
                if isinstance(effect, Reserve):
                    acceptance, source = await self._choose(effect.offers)
                    taken_us = int(1e6 * (time.monotonic() - arrived_s))
                    acceptance = replace(
                        acceptance, taken_us=taken_us, held_tokens=held_tokens or 0, codecs=self._codecs
                    )
                    yield encode_frame(receiver.accept(acceptance))
                elif isinstance(effect, Commit):
                    yield encode_frame(receiver.done())
        finally:
            reading.close()
            if source is not None:
                source.close()
            self._running.discard(mine)

    def close(self) -> None:
        """Leaves every transport that was joined."""
        for inlet in self._inlets.values():
            inlet.close()

    def _begin(self, transfer_id: bytes) -> bytes:
        if transfer_id in self._running:
            raise InvalidRequest("a KV transfer of this id is already on its way here")
        self._running.add(transfer_id)
        return transfer_id

    async def _choose(self, offers: Sequence[Offer]) -> tuple[Acceptance, Source | None]:
        """Chooses the first offer that can really be used."""
        declined = []
        for offer in offers:
            inlet = self._inlets.get(offer.name)
            if inlet is None:
                declined.append((offer.name, "the receiver does not know it"))
                continue
            try:
                source = await inlet.join(offer.parameters)
            except HalfmoonError as err:
                declined.append((offer.name, err.message))
                continue
            return Acceptance(offer.name, tuple(declined)), source
        return Acceptance(INLINE, tuple(declined)), None


class _Reading:
    """Owns the pending read of the next message, which proceeds while the previous one is processed."""

    def __init__(self, messages: AsyncIterator[bytes], lease_s: float, aborted: asyncio.Future[None] | None) -> None:
        self._messages = messages
        self._lease_s = lease_s
        self._aborted = aborted
        self._next = asyncio.ensure_future(next_message(messages, None))

    @property
    def has_next(self) -> bool:
        """Whether the next message, or the end, has already arrived."""
        return self._next.done()

    async def next(self) -> bytes | None:
        """The next message, None after the last. Raises DeadlineExceeded after `lease_s` of silence."""
        if not self._next.done():
            first: set[asyncio.Future[Any]] = {self._next} if self._aborted is None else {self._next, self._aborted}
            await asyncio.wait(first, timeout=self._lease_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._next.done():
            if self._aborted is not None and self._aborted.done():
                self._aborted.result()
            raise DeadlineExceeded(f"the sender was silent for {self._lease_s:g} s: its reservation expired")
        message = self._next.result()
        if message is not None:
            self._next = asyncio.ensure_future(next_message(self._messages, None))
        return message

    def close(self) -> None:
        """Stops waiting."""
        if not self._next.cancel() and not self._next.cancelled():
            self._next.exception()  # a broken stream has already been reported


async def _whole(frame: Frame | Elsewhere, source: Source | None) -> Frame:
    if isinstance(frame, Frame):
        return frame
    if source is None:
        raise Incompatible("a KV frame whose payload lies elsewhere came where that was not agreed")
    return frame.with_payload(await source.fetch(frame.reference, frame.payload_bytes))


def _check_intact(arrived: Frame | Elsewhere, source: Source | None) -> None:
    """Raises DataLoss if a payload may have been replaced before it was processed."""
    if isinstance(arrived, Elsewhere) and source is not None and not source.is_intact(arrived.reference):
        raise DataLoss("the place of a KV frame was used again while it was read: its sender has given it up")


async def next_message(messages: AsyncIterator[Received], lease_s: float | None) -> Received | None:
    """The sender's next message, None after its last. Raises DeadlineExceeded after `lease_s` of silence, if set."""
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
    """The protobuf body of a control frame. Raises InvalidRequest if it is malformed."""
    try:
        return message_class.FromString(bytes(body))
    except DecodeError as err:
        raise InvalidRequest(f"the body of a frame is not the {message_class.__name__} it must be") from err
