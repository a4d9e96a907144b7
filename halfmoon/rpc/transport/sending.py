"""One outgoing KV transfer: frames to the stream, payloads to the transport's memory."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from halfmoon.errors import DeadlineExceeded, HalfmoonError, InvalidRequest, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES, Frame, KVRange, decode_frame, encode_frame
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.kv.negotiation import encode_open
from halfmoon.kv.sender import TransferSending
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.status import error_from, in_our_tree
from halfmoon.rpc.transport.inline import InlineOutlet
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.protocol import Outlet, StagingBuffer
from halfmoon.rpc.transport.window import Share

log = logging.getLogger(__name__)

PUSH_METHOD = "/halfmoon.KVTransfer/Push"


class TransferSender:
    """Owns the sending end of one transfer. Knows nothing of where KV is stored.

    It runs two tasks: one writes the queue of messages, which the link's window bounds, the other reads the answers.
    When either fails, every method raises the reason.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall, link: KVLink, layout: KVLayout) -> None:
        self._call = call
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._machine = TransferSending(layout, os.urandom(16))
        self._outlet: Outlet = InlineOutlet()
        self._share = Share()
        self._staged: set[StagingBuffer] = set()  # handed out, not sent
        self._under_way: dict[int, tuple[StagingBuffer, int, Codec]] = {}  # by sequence number; payload bytes
        self._messages: deque[tuple[bytes, float]] = deque()  # with the time of arrival at the far end
        self._has_messages = asyncio.Event()
        self._heard: asyncio.Future[None] = self._loop.create_future()  # the next answer, of any kind
        self._answers: deque[Frame] = deque()  # ACCEPT, then DONE
        self._broken: asyncio.Future[HalfmoonError] = self._loop.create_future()
        self._tasks = [self._loop.create_task(work) for work in (self._write(), self._read())]

    async def open(self, whole: KVRange, body: bytes, codec: Codec = Codec.RAW, *, skips_held: bool = False) -> None:
        """Reserves room and agrees on a transport; returns when the receiver has accepted. Raises a refusal's reason.

        Payloads will be in `codec`: some transports take only raw ones. `skips_held`: the caller sends only what the
        receiver lacks, see `held_tokens`.
        """
        offers = await self._link.offers(codec)
        opened_s = self._link.clock.time()
        self._send(self._machine.open(whole, encode_open(offers, body), skips_held=skips_held))
        await self._answer()
        acceptance = self._machine.acceptance
        assert acceptance is not None
        self._link.estimator.answered(self._link.clock.time() - opened_s - acceptance.taken_us / 1e6)
        self._outlet = self._link.chosen(acceptance)

    @property
    def transfer_id(self) -> bytes:
        """The transfer's id on the stream, 16 bytes."""
        return self._machine.transfer_id

    @property
    def held_tokens(self) -> int:
        """Leading tokens that the receiver holds already: `data` must not send them."""
        return self._machine.held_tokens

    @property
    def codecs(self) -> frozenset[Codec]:
        """The codecs that the receiver decodes."""
        acceptance = self._machine.acceptance
        return frozenset({Codec.RAW}) if acceptance is None else acceptance.codecs

    @property
    def batch_bytes(self) -> float:
        """See `KVLink.batch_bytes`."""
        return self._link.batch_bytes

    @property
    def transport(self) -> str:
        """The name of the agreed transport."""
        return self._outlet.name

    async def renew(self) -> None:
        """Keeps the reservation while there is nothing to send."""
        self._check()
        self._send(self._machine.renew())

    async def buffer(self, num_bytes: int) -> StagingBuffer:
        """Room for a payload of up to MAX_PAYLOAD_BYTES, to be filled and passed to `data`.

        Waits while the receiver is behind. Raises InvalidRequest if it is too long, DeadlineExceeded if the link
        stalls.
        """
        await self._take(num_bytes)
        buffer = self._outlet.room(num_bytes)
        self._staged.add(buffer)
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Returns a `buffer` that will not be sent."""
        self._staged.remove(buffer)
        self._link.abandon(self._outlet, buffer, self._share)

    async def data(self, part: KVRange, payload: KVBytes | StagingBuffer, codec: Codec = Codec.RAW) -> None:
        """Sends KV bytes, from a filled `buffer` or from any other memory, which waits while the receiver is behind."""
        self._check()
        if isinstance(payload, StagingBuffer):
            self._staged.remove(payload)
            buffer = payload
        else:
            view = memoryview(payload).cast("B")
            await self._take(view.nbytes)
            buffer = self._outlet.hold(view)
        frame = self._machine.data(part, buffer.place, codec)
        now_s, num_bytes = self._link.clock.time(), buffer.num_bytes
        self._under_way[frame.sequence] = buffer, num_bytes, codec
        for estimator in self._link.estimators(codec):
            estimator.sent(num_bytes, now_s)
        self._send(frame, buffer.reference)
        if not buffer.reference:
            self._outlet.reuse(buffer)

    async def commit(self, body: bytes) -> None:
        """Declares that everything was sent; returns when the receiver has acted on `body`."""
        self._check()
        self._send(self._machine.commit(body))
        await self._answer()

    async def until_broken(self) -> None:
        """Never returns; raises as soon as the receiver ends the call. For use while nothing is being sent."""
        raise await asyncio.shield(self._broken)

    async def close(self) -> None:
        """Ends the call; the receiver frees what it did not commit."""
        self._break(Unavailable("the KV transfer is over"))
        self._call.cancel()
        for task in self._tasks:
            task.cancel()  # neither of them receives anything any more
        self._give_all_back()  # before any await, which may be cancelled, while the link lives on
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # their errors refer to us, and gRPC keeps a connection as long as its calls live

    def _give_all_back(self) -> None:
        for buffer in self._staged:
            self._link.abandon(self._outlet, buffer, self._share)
        for buffer, num_bytes, codec in self._under_way.values():
            for estimator in self._link.estimators(codec):
                estimator.lost(num_bytes, self._link.clock.time())
            self._settle(buffer)

    async def _take(self, num_bytes: int) -> None:
        """Waits for room in the window."""
        self._check()
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(f"a frame's payload of {num_bytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
        self._link.unpark()
        charge_bytes = self._outlet.charge_bytes(num_bytes)
        await self._link.window.take(self._share, charge_bytes, self._link.settings.stall_s)
        if self._broken.done():
            self._link.window.give_back(self._share, charge_bytes)
            raise self._broken.result()

    def _settle(self, buffer: StagingBuffer) -> None:
        """Frees the place of a frame that was consumed, or never will be, and its part of the window."""
        if buffer.reference:
            self._outlet.reuse(buffer)
        self._link.window.give_back(self._share, buffer.charge_bytes)

    def _send(self, frame: Frame, reference: bytes = b"") -> None:
        now_s = self._link.clock.time()
        limiter, num_bytes = self._link.limiter, frame.payload_bytes
        self._messages.append(
            (encode_frame(frame, reference), now_s if limiter is None else limiter.arrival_s(num_bytes, now_s))
        )
        self._has_messages.set()

    async def _answer(self) -> Frame:
        """Waits for ACCEPT or DONE."""
        while not self._answers:
            await self._hear_more()
        return self._answers.popleft()

    async def _hear_more(self) -> None:
        """Waits for another answer. Raises why the transfer ended, or DeadlineExceeded when the link stalls."""
        heard, stall_s = self._heard, self._link.settings.stall_s
        while not heard.done():
            num_messages = len(self._messages)
            first: set[asyncio.Future[Any]] = {heard, self._broken}
            done, _ = await asyncio.wait(first, timeout=stall_s, return_when=asyncio.FIRST_COMPLETED)
            if heard in done:
                return
            self._check()
            if len(self._messages) == num_messages:
                raise DeadlineExceeded(f"the receiver of a KV transfer did not answer for {stall_s:g} s")

    def _check(self) -> None:
        if self._broken.done():
            raise self._broken.result()

    def _break(self, error: HalfmoonError) -> None:
        if not self._broken.done():
            self._broken.set_result(error)
            self._link.window.fail(self._share, error)

    async def _write(self) -> None:
        try:
            while True:
                await self._has_messages.wait()
                while self._messages:
                    message, arrival_s = self._messages[0]
                    wait_s = arrival_s - self._link.clock.time()
                    if wait_s > 0:
                        await self._link.clock.sleep(wait_s)
                    with in_our_tree(self._link.peer.address):
                        await self._call.write(message)
                    self._messages.popleft()
                self._has_messages.clear()
        except HalfmoonError as error:
            self._break(error)
        except asyncio.InvalidStateError:  # the call has ended
            self._break(await self._failure())
        except Exception as error:
            self._break(_internal(error))

    async def _read(self) -> None:
        try:
            while self._machine.state != "done":
                with in_our_tree(self._link.peer.address):
                    message = await self._call.read()
                if message is grpc.aio.EOF:
                    raise await self._failure()
                self._hear(decode_frame(message))
        except HalfmoonError as error:
            self._break(error)
        except Exception as error:
            self._break(_internal(error))

    def _hear(self, answer: Frame) -> None:
        credited = self._machine.handle(answer)
        if not credited:
            self._answers.append(answer)
        for sequence in credited:
            buffer, num_bytes, codec = self._under_way.pop(sequence)
            for estimator in self._link.estimators(codec):
                estimator.consumed(num_bytes, self._link.clock.time())
            self._settle(buffer)
        heard, self._heard = self._heard, self._loop.create_future()
        heard.set_result(None)

    async def _failure(self) -> HalfmoonError:
        code = await self._call.code()
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


def _internal(error: Exception) -> HalfmoonError:
    """Logs a bug of ours and turns it into an error, so that the transfer does not hang."""
    log.error("kv.sender_failed", exc_info=error)
    return HalfmoonError("internal error in a KV transfer: see the log of its sender")


@asynccontextmanager
async def transfer_to(
    to: Peer | KVLink, layout: KVLayout, *, deadline_s: float, method: str = PUSH_METHOD
) -> AsyncIterator[TransferSender]:
    """A transfer over a link, or to a peer without one: then its payloads travel inside their messages.

    Leaving the context before `commit` has returned frees what the receiver reserved.
    """
    link = to if isinstance(to, KVLink) else KVLink(to, LinkSettings(transports=()))
    call = link.peer.raw_stream(method, deadline_s=deadline_s)
    sender = TransferSender(call, link, layout)
    try:
        yield sender
    finally:
        await sender.close()
