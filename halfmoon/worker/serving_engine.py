"""What a worker's RPC layer needs from its engine: `AsyncEngine` or a simulated one. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.prefix_cache import CacheChanges
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.kv_layout import KVDtype, KVLayout, KVSlice


class ServingEngine(Protocol):
    """An engine that steps by itself. Event-loop thread only. `AsyncEngine` documents each method's contract."""

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """Queues a request."""

    @property
    def keeps_partial_blocks(self) -> bool:
        """Whether a request may go on within a block that another one, of `keeps_partial`, has begun."""
        ...

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> int:
        """Reserves room for a request whose KV comes from elsewhere. Returns how many leading tokens are here."""

    async def start(self, request_id: str, first_token_id: int, *, is_private: bool = False) -> None:
        """Starts a reserved request once its KV is here, which no other request may find if it is private."""

    async def cancel(self, request_id: str) -> bool:
        """Frees a request in any state."""

    async def forget_prefixes(self) -> CacheChanges:
        """Empties the prefix cache, except for blocks in use; returns what no step reports."""

    async def kv_write(
        self,
        request_id: str,
        part: KVSlice,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """Writes arriving KV of a reserved request."""

    async def kv_read(
        self, request_id: str, part: KVSlice, out: KVPlace | None = None, codec: Codec = Codec.RAW
    ) -> memoryview:
        """Reads KV of a prefill-only request."""

    def check_open(self) -> None:
        """Raises Unavailable once the engine computes nothing any more."""

    def stats_now(self) -> EngineStats:
        """Returns counts without waiting for the end of a step."""


class LayerLoading(Protocol):
    """An engine whose steps can wait for layers that arrive. `AsyncEngine` documents each method's contract."""

    async def load_layers(self, request_id: str, layers: range, payloads: Mapping[int, KVSource]) -> None:
        """Writes some layers of awaited blocks."""

    def arrive_by_layer(self, request_id: str, gate: LayerGate) -> None:
        """Lets the step behind the awaited blocks begin while their layers arrive."""


class PoolingEngine(ServingEngine, Protocol):
    """A `ServingEngine` whose blocks can be loaded from elsewhere, and read by others."""

    @property
    def layout(self) -> KVLayout:
        """Layout of a block."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model, a part of block keys."""

    @property
    def computes_while_loading(self) -> bool:
        """Whether the blocks below a request's fence are computed while the others are awaited."""

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of a step beside other work."""

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens of a step."""

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """Queues a request, some blocks of which are awaited."""

    @property
    def layer_loading(self) -> LayerLoading | None:
        """How blocks are loaded layer by layer; None: no step can wait for a layer."""

    async def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """Writes an awaited block."""

    def note_loaded(self, request_id: str, loaded: Sequence[int], given_up: Sequence[int] = ()) -> None:
        """Notes which awaited blocks were written, and which will not be."""

    async def move_fence(self, request_id: str, fence: int) -> int:
        """Moves the first awaited block."""

    def cached(self, keys: Sequence[bytes]) -> AbstractAsyncContextManager[list[int]]:
        """Holds the blocks of the leading keys that are cached."""

    async def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """Reads a held block, or some successive layers of it."""
