"""Sends one request's KV while the engine still computes it (Mooncake's layer-wise prefill)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from halfmoon.background import running
from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.errors import NotFound
from halfmoon.kv.codec import LOSSLESS, Codec, encoded_bytes, gainful
from halfmoon.kv.device_bytes import KVPlace
from halfmoon.kv.frame import KVRange
from halfmoon.kv.frame_plan import FramePlan, Written
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transfer import TransferSender
from halfmoon.rpc.transport.protocol import StagingBuffer
from halfmoon.worker.servicers.request_dropped import RequestDropped
from halfmoon.worker.serving_engine import ServingEngine


class LayerwiseSender:
    """Owns which part of one request's KV has been sent over a transfer. Event-loop thread only.

    The engine reports how much is written and goes on; only the newest report is kept. A frame is gathered when the
    transfer has room for it, straight into the buffer that is sent. A slow receiver therefore slows only its own
    transfer, and the slower it is, the larger its frames become.

    Sending begins when a batch is together (`LinkSettings.batch_s`) or nothing more comes; what is written meanwhile
    joins it.

    The engine may begin while the transfer is being opened. `codec` is what the receiver decodes once it is open.
    """

    def __init__(
        self,
        engine: ServingEngine,
        transfer: TransferSender,
        layout: KVLayout,
        request_id: str,
        num_tokens: int,
        codec: Codec,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._layout = layout
        self._request_id = request_id
        self._num_tokens = num_tokens
        self.codec = codec
        self._written = Written()
        self._news = asyncio.Event()
        self.dropped = RequestDropped(engine)
        self.num_bytes = 0
        self.num_raw_bytes = 0

    def on_kv(self, written: Written | None) -> None:
        """Takes the engine's report: what is written now, or None when the request is gone."""
        if written is None:
            self.dropped.notify()
            return
        self._written = written
        self._news.set()

    async def open(self, body: bytes) -> None:
        """Opens the transfer of all layers and heads. Raises the receiver's refusal."""
        whole = KVRange(0, self._layout.num_layers, 0, self._layout.num_kv_heads, 0, self._num_tokens)
        await self._transfer.open(whole, body, self.codec, skips_held=True)
        if self.codec not in self._transfer.codecs:
            self.codec = Codec.RAW

    @asynccontextmanager
    async def running(self, opening: asyncio.Future[Any]) -> AsyncIterator[asyncio.Task[None]]:
        """Sends while inside, once `opening` is done, within which `open` is called.

        The task ends when everything has been handed to the transport.

        It raises the transfer's errors. `dropped` reports, even after that, that the engine has dropped the request.
        """
        try:
            async with running(self._run(opening)) as sending:
                yield sending
        finally:
            self.dropped.close()

    async def _run(self, opening: asyncio.Future[Any]) -> None:
        await asyncio.shield(opening)
        plan = FramePlan(self._layout, self._num_tokens, self._transfer.held_tokens)
        while not plan.is_done:
            written = await self._newer()
            if not plan.has_batch(written, self._transfer.batch_bytes):
                continue
            while (part := plan.next(written)) is not None:
                self.num_bytes += await self._send(part)
                self.num_raw_bytes += part.num_bytes(self._layout)
                plan.sent(part)
                written = self._written

    async def _newer(self) -> Written:
        """Waits for the engine's next report."""
        await self._news.wait()
        self._news.clear()
        return self._written

    async def _send(self, part: KVRange) -> int:
        """Sends one frame; returns its encoded size in bytes."""
        shape, dtype = part.shape(self._layout), self._layout.dtype
        codec = gainful(self.codec, shape, dtype)
        if codec in LOSSLESS:
            payload = await self._compressed(part, codec)
            if payload.nbytes < part.num_bytes(self._layout):
                await self._transfer.data(part, payload, codec)
                return payload.nbytes
            codec = Codec.RAW
        num_bytes = encoded_bytes(codec, shape, dtype)
        buffer = await self._transfer.buffer(num_bytes)
        while not await self._gather(part, buffer, codec):
            self._transfer.give_back(buffer)  # requests that hold the memory needed may wait for it
            await self._newer()
            buffer = await self._transfer.buffer(num_bytes)
        await self._transfer.data(part, buffer, codec)
        return num_bytes

    async def _compressed(self, part: KVRange, codec: Codec) -> memoryview:
        """Gathers a frame whose size is not known before."""
        while (payload := await self._read(part, None, codec)) is None:
            await self._newer()
        return payload

    async def _gather(self, part: KVRange, buffer: StagingBuffer, codec: Codec) -> bool:
        """Gathers a frame; False if a preemption took the KV back. The engine reports when it is written again."""
        return await self._read(part, buffer.place, codec) is not None

    async def _read(self, part: KVRange, out: KVPlace | None, codec: Codec) -> memoryview | None:
        try:
            return await self._engine.kv_read(self._request_id, part.all_heads, out, codec)
        except NotWritten:
            return None
        except NotFound:
            raise self.dropped.error() from None
