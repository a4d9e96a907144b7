"""The half of the engine that copies KV of present requests into the shared memory, and out of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from halfmoon.engine.kv_memory.coded_copies import read_encoded, write_decoded
from halfmoon.engine.kv_memory.kv_access import KVAccess
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.errors import Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.kv_layout import KVDtype, KVSlice
from halfmoon.vllm_engine.requests.present_requests import PresentRequests
from halfmoon.vllm_engine.requests.shared_blocks import SharedBlocks
from halfmoon.vllm_engine.staging import StagingMemory

T = TypeVar("T")

_NUM_COPY_THREADS = 2


class StagedKV:
    """Owns the threads that copy. Event-loop thread only."""

    def __init__(self, memory: StagingMemory, blocks: SharedBlocks, requests: PresentRequests) -> None:
        self.layout = memory.layout
        self._kv = KVAccess(KVArena(memory.layout, memory.num_blocks, "cpu", memory=memory.kv))
        self._blocks = blocks
        self._requests = requests
        self._dead: BaseException | None = None
        self._copies = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="kv-copy")

    def check_open(self) -> None:
        """See `AsyncEngine.check_open`."""
        if self._dead is not None:
            raise Unavailable(f"vLLM does not compute any more: {self._dead}")

    async def kv_write(
        self,
        request_id: str,
        part: KVSlice,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """See `AsyncEngine.kv_write`."""
        sequence = self._requests.find(request_id).sequence
        write = partial(self._kv.write, sequence, part)
        shape = self.layout.shape(part.num_layers, part.num_tokens)
        await self._copy(partial(write_decoded, write, self.layout, shape, payload, codec, dtype))

    async def kv_read(
        self, request_id: str, part: KVSlice, out: KVPlace | None = None, codec: Codec = Codec.RAW
    ) -> memoryview:
        """See `AsyncEngine.kv_read`."""
        sequence = self._requests.find(request_id).sequence
        read = partial(self._kv.read, sequence, part)
        shape = self.layout.shape(part.num_layers, part.num_tokens)
        return await self._copy(partial(read_encoded, read, self.layout, shape, out, codec))

    async def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """See `AsyncEngine.load_block`."""
        await self._copy(partial(self._kv.load, self._requests.find(request_id).sequence, block, self.layout, payload))

    @asynccontextmanager
    async def cached(self, keys: SequenceOf[bytes]) -> AsyncIterator[list[int]]:
        """See `AsyncEngine.cached`: of the shared memory, which has the last prompts and answers."""
        with self._blocks.held(keys) as blocks:
            yield blocks

    async def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """See `AsyncEngine.read_block`."""
        return await self._copy(partial(self._kv.read_block, block, self.layout, layers))

    async def _copy(self, call: Callable[[], T]) -> T:
        self.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._copies, call)
