"""One rank's KV memory, which ranks of other workers reach by ticket: see `kv.staged_shards`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from halfmoon.engine.kv_memory.kv_access import KVMemory
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.kv_layout import KVLayout, KVSlice, Shard
from halfmoon.kv.staged_shards import RankShard, StagedShards, Ticket, WorkerRanks, rows_of


class KVByTicket:
    """Owns the parts that the only rank of a worker keeps. What has no ticket is read and written as in `memory`."""

    def __init__(self, memory: KVMemory, layout: KVLayout) -> None:
        self._memory = memory
        self._num_kv_heads = layout.num_kv_heads
        self.ranks = WorkerRanks((RankShard(0, layout.whole()),), (True,), layout.dtype, StagedShards())

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self._memory.num_blocks

    def read(self, blocks: Sequence[int], part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """See `KVArena.read`. For a ticket, the bytes are kept until another worker's ranks fetch them."""
        if not isinstance(out, DeviceBytes) or not isinstance(out.cells, Ticket):
            return self._memory.read(blocks, part, out)
        place = Shard(part.layer_start, part.layer_end, 0, self._num_kv_heads)
        rows = rows_of(place, part.num_tokens, self._memory.read(blocks, part))
        self.ranks.staged.put(out.cells, 0, place, rows, time.monotonic())
        return memoryview(b"")

    def write(self, blocks: Sequence[int], part: KVSlice, payload: KVSource) -> None:
        """See `KVArena.write`. For a ticket, writes what is kept under it; raises Unavailable if that is gone."""
        if isinstance(payload, DeviceBytes) and isinstance(payload.cells, Ticket):
            payload = self.ranks.staged.take(payload.cells, 0)
        self._memory.write(blocks, part, payload)
