"""Serves the worker's prefix cache to other workers, by the calls by which a store serves its blocks, and what it
computes of shared prompts to those who share them.

Read-only: halfmoon.KVStore.Match and halfmoon.KVStoreBytes.Get. Block keys depend on model, KV layout and tenant salt:
a worker finds the blocks of the requests that it is given, and those whose tenant and tokens it guesses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.errors import Incompatible, InvalidRequest, NoCapacity, NotFound, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.pb import kvstore_pb2
from halfmoon.policy.view.fetch_costs import most_of_reader
from halfmoon.rpc.store.block_streams import (
    BYTES_SERVICE,
    block_frames,
    layer_parts,
    opened_run,
    requested_codec,
    whole_blocks,
)
from halfmoon.rpc.transfer import next_message, raw_service
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.sharing.shared_prompts import SharedPrompt
from halfmoon.worker.state import WorkerState

_MAX_READERS = 16
_COPIED_BYTES = 64 << 20  # most bytes of blocks that are copied and not yet sent
_FIRST_MESSAGE_S = 5.0
_SHARED_WAIT_S = 2.0  # the workers of a shared prompt are asked to compute it one after the other
_LONGEST_S = 60.0  # a reader that does not read on holds its blocks until its deadline
_BUSY_MS = 200


class CachedKV(Protocol):
    """An engine whose prefix cache can be read. `AsyncEngine` documents each method."""

    def cached(self, keys: Sequence[bytes]) -> AbstractAsyncContextManager[list[int]]:
        """Holds the blocks of the leading keys that are cached."""

    async def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """Reads a held block, or some successive layers of it."""

    async def kv_read(self, request_id: str, part: KVSlice) -> memoryview:
        """Reads KV of a prompt that is being computed."""


class CacheServicer:
    """Owns how much of the worker its readers use: calls, blocks held, one copy and one encoding at a time.

    Readers beyond are refused with NoCapacity, so that a prefix that everybody wants does not take the memory and the
    copying threads from the worker's own requests.
    """

    def __init__(self, engine: CachedKV, num_blocks: int, state: WorkerState, metrics: WorkerMetrics) -> None:
        """num_blocks: of the worker's KV memory."""
        self._engine = engine
        self._state = state
        self._metrics = metrics
        self._max_readers = max(1, min(_MAX_READERS, _COPIED_BYTES // state.layout.block_bytes))
        self._num_blocks = num_blocks
        self._num_readers = 0
        self._num_held = 0
        self._copying = asyncio.Lock()
        self._encoding = asyncio.Lock()

    def registrations(self) -> tuple[Callable[[grpc.aio.Server], None], ...]:
        """Registrations of the methods at a server."""
        match = grpc.unary_unary_rpc_method_handler(
            self.match, kvstore_pb2.MatchRequest.FromString, kvstore_pb2.MatchResponse.SerializeToString
        )
        control = grpc.method_handlers_generic_handler("halfmoon.KVStore", {"Match": match})
        return (
            lambda server: server.add_generic_rpc_handlers((control,)),
            raw_service(BYTES_SERVICE, {"Get": self.get}),
        )

    async def match(
        self, request: kvstore_pb2.MatchRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.MatchResponse:
        """Counts the leading keys that the prefix cache had after the last step."""
        num_matched = self._state.cached_blocks.depth(request.keys)
        most = most_of_reader(self._num_blocks, self._num_held)
        return kvstore_pb2.MatchResponse(
            num_matched=num_matched, tiers=[kvstore_pb2.DRAM] * num_matched, most_by_layer=most
        )

    async def get(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Sends the leading blocks that are cached, as many as one reader may hold: DATA frames, then DONE."""
        left_s = context.time_remaining()
        if left_s is None or left_s > _LONGEST_S:
            raise InvalidRequest(f"a Get holds blocks: give it a deadline of at most {_LONGEST_S:g} s")
        message = await next_message(messages, _FIRST_MESSAGE_S)
        if message is None:
            raise Unavailable("the reader ended the stream before its OPEN")
        opening, layout = decode_frame(message), self._state.layout
        opened = opened_run(opening)
        if not opened.keys:
            raise InvalidRequest("a Get must name the blocks that it wants", param="keys")
        if opening.layout_fingerprint != layout.fingerprint():
            raise Incompatible("the cached blocks have another KV layout than their reader")
        opening.range.check_within(whole_blocks(layout, opening.range.token_start, 1))
        is_shared = bool(opened.request_id)
        with nullcontext(0) if is_shared else self._reading(len(opened.keys)) as most:
            served = self._shared_frames(opening, opened) if is_shared else self._frames(opening, opened, most)
            async with aclosing(served) as frames:
                async for frame in frames:
                    yield encode_frame(frame)

    async def _frames(self, opening: Frame, opened: kvstore_pb2.BlocksOpen, most: int) -> AsyncGenerator[Frame, None]:
        layout, num_sent, codec = self._state.layout, 0, requested_codec(opened)
        encoding = nullcontext() if codec is Codec.RAW else self._encoding
        async with self._engine.cached(opened.keys[:most]) as blocks:
            if not blocks:
                self._metrics.store.cache_reads.labels("missing").inc()
                raise NotFound("the block is not, or no longer, in this worker's prefix cache")
            if opened.layers_at_once:
                yield replace(opening, kind=FrameKind.ACCEPT, sequence=len(blocks), payload=b"")
            for part in layer_parts(opening.range, opened.layers_at_once):
                first, wanted = part.layer_start, replace(opening, range=part)
                for index, block in enumerate(blocks):
                    async with self._copying:
                        cells = await self._engine.read_block(block, range(first, part.layer_end))
                    async with encoding:
                        coded = block_frames(cells, layout, wanted, index, num_sent, first, codec)
                        frames = [frame async for frame in coded]
                    for frame in frames:
                        yield frame
                    num_sent += len(frames)
                    self._metrics.store.cache_served_bytes.inc(part.num_bytes(layout))
        self._metrics.store.cache_reads.labels("served").inc()
        yield Frame(FrameKind.DONE, opening.transfer_id, opening.layout_fingerprint, num_sent)

    async def _shared_frames(self, opening: Frame, opened: kvstore_pb2.BlocksOpen) -> AsyncGenerator[Frame, None]:
        """Some successive blocks of a prompt that is computed here, layer by layer as they are computed."""
        layout, wanted, num_blocks, num_sent = self._state.layout, opening.range, len(opened.keys), 0
        prompt = await self._state.shared_prompts.get(opened.request_id, _SHARED_WAIT_S)
        first = wanted.token_start // layout.block_tokens
        if list(prompt.keys[first : first + num_blocks]) != list(opened.keys):
            raise NotFound("this worker computes another prompt under this request's id")
        yield replace(opening, kind=FrameKind.ACCEPT, sequence=num_blocks, payload=b"")
        for part in layer_parts(wanted, opened.layers_at_once):
            cells = await self._computed(prompt, replace(part, num_tokens=num_blocks * layout.block_tokens))
            for index in range(num_blocks):
                tokens = slice(index * layout.block_tokens, (index + 1) * layout.block_tokens)
                block = np.ascontiguousarray(cells[:, :, :, tokens]).reshape(-1).data
                of_part = replace(opening, range=part)
                async for frame in block_frames(block, layout, of_part, index, num_sent, part.layer_start):
                    num_sent += 1
                    yield frame
        yield Frame(FrameKind.DONE, opening.transfer_id, opening.layout_fingerprint, num_sent)

    async def _computed(self, prompt: SharedPrompt, part: KVRange) -> NDArray[np.uint8]:
        """[layers, 2, heads, tokens, row bytes], once they are written. Raises NotFound if they never will be."""
        layout, end = self._state.layout, part.token_start + part.num_tokens
        while True:
            await prompt.until_written(part.layer_end, part.token_start, end)
            try:
                cells = await self._engine.kv_read(prompt.request_id, part.all_heads)
            except NotWritten:  # a preemption took it back
                await prompt.until_changed()
                continue
            self._metrics.store.cache_served_bytes.inc(cells.nbytes)
            rows = layout.shape(part.layer_end - part.layer_start, part.num_tokens)[:-1]
            return np.frombuffer(cells, np.uint8).reshape(*rows, layout.row_bytes)

    @contextmanager
    def _reading(self, num_blocks: int) -> Iterator[int]:
        """Counts one reader; yields how many blocks it may hold. Raises NoCapacity if others read already."""
        num_held = min(num_blocks, most_of_reader(self._num_blocks, self._num_held))
        if self._num_readers >= self._max_readers or num_held <= 0:
            self._metrics.store.cache_reads.labels("busy").inc()
            raise NoCapacity("too many others read this worker's prefix cache", retry_after_ms=_BUSY_MS)
        self._num_readers += 1
        self._num_held += num_held
        try:
            yield num_held
        finally:
            self._num_readers -= 1
            self._num_held -= num_held
