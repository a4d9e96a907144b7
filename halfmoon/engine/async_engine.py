"""The engine for asyncio: its methods as commands to its thread, and copies of KV concurrent with the steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from halfmoon.engine.engine import Engine
from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.engine_thread import EngineThread
from halfmoon.engine.kv_memory.coded_copies import read_encoded, write_decoded
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.prefix_cache import CacheChanges
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.step_result import StepResult
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.kv_layout import KVDtype, KVLayout, KVSlice

T = TypeVar("T")

_NUM_COPY_THREADS = 2  # for KV copied in and out during the steps


class AsyncEngine:
    """Owns the threads that copy KV. The engine's own thread is an `EngineThread`, which reports steps and its death.

    Created inside a running loop. After `async with` ends, or the thread has died, every method raises Unavailable and
    all blocks are free.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult], None],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(engine, on_step, on_death)
        self._copies = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="kv-copy")

    async def __aenter__(self) -> AsyncEngine:
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._thread.stop()
        await asyncio.to_thread(self._copies.shutdown)

    @property
    def layout(self) -> KVLayout:
        """Layout of a block."""
        return self.engine.layout

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model, a part of block keys."""
        return self.engine.checkpoint.fingerprint

    @property
    def computes_while_loading(self) -> bool:
        """True."""
        return True

    @property
    def keeps_partial_blocks(self) -> bool:
        """Whether `EngineRequest.keeps_partial` has an effect."""
        return self.engine.config.prefix_cache

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of a step beside other work."""
        return self.engine.config.prefill_chunk_tokens

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens of a step."""
        return self.engine.config.step_tokens

    def check_open(self) -> None:
        """Raises Unavailable, with the reason, once nothing is computed any more."""
        self._thread.check_open()

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """Calls `Engine.add`; listeners are called on the loop, in order. Cancelling the wait cancels the request."""
        if order is not None:
            order = replace(order, on_progress=self._thread.on_loop(order.on_progress))
        await self._call_or_cancel(partial(self.engine.add, request, self._on_loop(on_kv), order), request.request_id)

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> int:
        """Calls `Engine.reserve`; `on_kv` is called on the loop. Cancelling the wait cancels the reservation."""
        return await self._call_or_cancel(
            partial(self.engine.reserve, request, self._on_loop(on_kv)), request.request_id
        )

    async def start(self, request_id: str, first_token_id: int, *, is_private: bool = False) -> None:
        """Calls `Engine.start`."""
        await self._thread.call(partial(self.engine.start, request_id, first_token_id, is_private=is_private))

    async def cancel(self, request_id: str) -> bool:
        """Calls `Engine.cancel`. Once it returns, no more output of the request is delivered."""
        return await self._thread.call(partial(self.engine.cancel, request_id))

    async def forget_prefixes(self) -> CacheChanges:
        """Calls `Engine.forget_prefixes`."""
        return await self._thread.call(self.engine.forget_prefixes)

    async def stats(self) -> EngineStats:
        """Calls `Engine.stats` on the engine's thread."""
        return await self._thread.call(self.engine.stats)

    def stats_now(self) -> EngineStats:
        """Calls `Engine.stats` during a step: its counts may be of two moments."""
        return self.engine.stats()

    async def kv_write(
        self,
        request_id: str,
        part: KVSlice,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """Calls `Engine.kv_write` during the steps with values that `codec` encoded from `dtype` (None: the layout's).

        `payload` must not change until this returns. In device memory it must be raw and in the layout's dtype:
        otherwise raises Incompatible.
        """
        write = partial(self.engine.kv_write, request_id, part)
        shape = self.engine.layout.shape(part.num_layers, part.num_tokens)
        await self._copy(partial(write_decoded, write, self.engine.layout, shape, payload, codec, dtype))

    async def kv_read(
        self, request_id: str, part: KVSlice, out: KVPlace | None = None, codec: Codec = Codec.RAW
    ) -> memoryview:
        """Calls `Engine.kv_read` during the steps and encodes in `codec`. `out`, if given, has the exact encoded size.

        After a cancelled wait, `out` may still be written to.
        """
        read = partial(self.engine.kv_read, request_id, part)
        shape = self.engine.layout.shape(part.num_layers, part.num_tokens)
        return await self._copy(partial(read_encoded, read, self.engine.layout, shape, out, codec))

    @property
    def layer_loading(self) -> AsyncEngine | None:
        """This engine, if its steps can wait for layers that arrive."""
        return self if self.engine.loads_by_layer else None

    async def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """Calls `Engine.load_block` during the steps. `payload` must not change until this returns."""
        await self._copy(partial(self.engine.load_block, request_id, block, payload))

    async def load_layers(self, request_id: str, layers: range, payloads: Mapping[int, KVSource]) -> None:
        """Calls `Engine.load_block` for these layers of each block. The payloads must not change until this returns."""

        def load() -> None:
            for block, payload in payloads.items():
                self.engine.load_block(request_id, block, payload, layers)

        await self._copy(load)

    def arrive_by_layer(self, request_id: str, gate: LayerGate) -> None:
        """Calls `Engine.arrive_by_layer` before the next step at the latest."""
        self._thread.put(partial(self.engine.arrive_by_layer, request_id, gate))

    def note_loaded(self, request_id: str, loaded: Sequence[int], given_up: Sequence[int] = ()) -> None:
        """Calls `Engine.note_loaded` before the next step at the latest."""
        self._thread.put(partial(self.engine.note_loaded, request_id, loaded, given_up))

    async def move_fence(self, request_id: str, fence: int) -> int:
        """Calls `Engine.move_fence`."""
        return await self._thread.call(partial(self.engine.move_fence, request_id, fence))

    @asynccontextmanager
    async def cached(self, keys: Sequence[bytes]) -> AsyncIterator[list[int]]:
        """The blocks of the leading keys that the prefix cache has; inside the context they stay, for `read_block`."""
        blocks: list[int] = []
        try:
            await self._thread.call(lambda: blocks.extend(self.engine.hold_cached(keys)))
            yield blocks
        finally:
            self._thread.put(
                lambda: self.engine.let_cached_go(blocks)
            )  # runs after the call above, whether or not that was awaited

    async def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """Calls `Engine.read_block` during the steps."""
        return await self._copy(partial(self.engine.read_block, block, layers))

    def _on_loop(self, on_kv: OnKV | None) -> OnKV | None:
        return None if on_kv is None else self._thread.on_loop(on_kv)

    async def _copy(self, call: Callable[[], T]) -> T:
        self.check_open()
        return await self._loop.run_in_executor(self._copies, call)

    async def _call_or_cancel(self, call: Callable[[], T], request_id: str) -> T:
        admitted = False  # read and written only on the engine thread

        def admit() -> T:
            nonlocal admitted
            result = call()
            admitted = True
            return result

        def undo() -> None:
            if admitted:  # otherwise the id may belong to another request
                self.engine.cancel(request_id)

        try:
            return await self._thread.call(admit)
        except asyncio.CancelledError:
            self._thread.put(undo)
            raise
