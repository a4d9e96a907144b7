"""What the RPC half of a worker asks of its engine: `engine.async_engine.AsyncEngine`, or a simulated one. No torch."""

from __future__ import annotations

from typing import Protocol

from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.kv_layout import KVDtype


class ServingEngine(Protocol):
    """An engine that steps by itself. Event-loop thread only; `AsyncEngine`'s docstrings are the law of each method."""

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """Queues a request."""
        ...

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """Room for a request whose KV comes from elsewhere."""
        ...

    async def start(self, request_id: str, first_token_id: int) -> None:
        """The KV of a reserved request is here."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Frees a request in any state."""
        ...

    async def kv_write(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """KV of a reserved request arrives."""
        ...

    async def kv_read(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        out: KVPlace | None = None,
        codec: Codec = Codec.RAW,
    ) -> memoryview:
        """KV of a prefill-only request leaves."""
        ...

    def check_open(self) -> None:
        """Raises Unavailable once nothing is computed any more."""
        ...

    def stats_now(self) -> EngineStats:
        """Counts without waiting for the end of a step."""
        ...
