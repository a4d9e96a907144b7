"""The loads of one shared prompt: what the other workers compute of it, layer by layer as they compute it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from halfmoon.background import uncancelled
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.errors import HalfmoonError
from halfmoon.kv.codec import Codec
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.models.segments import SEGMENT_PASSES
from halfmoon.worker.metrics import StoreMetrics
from halfmoon.worker.serving_engine import LayerLoading, PoolingEngine
from halfmoon.worker.sharing.segments import Segment, Segments
from halfmoon.worker.store.holder import Holder, Holders

log = logging.getLogger(__name__)

_MOST_S = 60.0  # a worker serves no longer call
_LEAST_S = 3.0
_SEGMENT_FACTOR = 3.0  # a worker may be so many times slower than expected before its segments are computed here
_LEAST_PATIENCE_S = 0.5


class SegmentLoads:
    """Owns what is awaited of one prompt from the workers that share it. `add` it to the engine, then `run`.

    A segment that does not come is computed here: no worker's death costs the prompt more than time.
    """

    def __init__(
        self,
        engine: PoolingEngine,
        metrics: StoreMetrics,
        request: EngineRequest,
        keys: Sequence[bytes],
        segments: Segments,
        holders: Holders,
        model: PrefillModel,
    ) -> None:
        """keys: of the prompt's whole blocks; holders: of KV, by address; model: of this worker's steps."""
        assert engine.layer_loading is not None, "segments are read before"
        self._engine = engine
        self._loading: LayerLoading = engine.layer_loading
        self._metrics = metrics
        self._request = request
        self._keys = keys
        self._segments = segments
        self._holders = holders
        self._model = model
        self._num_layers = engine.layout.num_layers
        self._layers_at_once = -(-self._num_layers // SEGMENT_PASSES)
        self._runs = [_Run(run, self._num_layers) for run in segments.of_others]
        self._has_begun = asyncio.Event()
        self._first_block = 0  # behind what the prefix cache has
        self.num_loaded_tokens = 0
        self.num_planned_tokens = sum(len(run.blocks) for run in self._runs) * engine.layout.block_tokens
        self.num_blocks_from_workers = 0
        self.ended_s = time.monotonic()

    async def add(self, on_kv: OnKV | None) -> None:
        """Adds the request to the engine, which awaits the others' segments."""
        awaited = max((run.blocks[-1] + 1 for run in self._runs), default=0)
        own = tuple(blocks for blocks in self._segments.of_own if blocks.start < awaited)
        order = RestoreOrder(awaited, 0, self._on_progress, own, self._layers_at_once)
        await self._engine.add(self._request, on_kv, order)

    def abandon(self) -> None:
        """Does nothing: nobody else counts on these loads."""

    async def run(self) -> None:
        """Loads until every segment has come, or will not. Those are then computed here."""
        try:
            await self._has_begun.wait()
            async with asyncio.TaskGroup() as tasks:
                for owner, address in enumerate(self._segments.addresses):
                    if owner != self._segments.own:
                        tasks.create_task(self._load_from(owner, address))
        finally:
            for run in self._runs:
                run.gate.fail()
            blocks = [block for run in self._runs for block in run.blocks]
            self._engine.note_loaded(self._request.request_id, (), blocks)

    def _on_progress(self, num_tokens: int, num_loaded: int) -> None:
        if not self._has_begun.is_set():
            self._first_block = num_tokens // self._engine.layout.block_tokens
            for run in self._runs:
                run.begin(self._first_block, self._patience_s(run))
        self.num_loaded_tokens = num_loaded
        self._has_begun.set()

    async def _load_from(self, owner: int, address: str) -> None:
        """Loads one worker's segments in order. After the first failure none is asked for."""
        async with self._holders.worker(address) as holder:
            await self._load_all(owner, holder)

    async def _load_all(self, owner: int, holder: Holder) -> None:
        mine = [(run, segment) for run in self._runs for segment in run.segments if segment.owner == owner]
        for number, (run, segment) in enumerate(mine):
            blocks = [block for block in segment.blocks if block >= self._first_block]
            if not blocks:
                run.came(segment, self._num_layers)
                continue
            try:
                came = await self._load(holder, run, segment, blocks)
            except HalfmoonError as error:
                came = []
                log.info("segment.failed", extra={"address": holder.address, "reason": error.message})
            self.ended_s = time.monotonic()
            if len(came) < len(blocks):
                self._give_up(mine[number:])
                return
            self.num_blocks_from_workers += len(came)
            self._metrics.shared_segments.labels("arrived").inc()
            self._engine.note_loaded(self._request.request_id, came)

    def _give_up(self, rest: Sequence[tuple[_Run, Segment]]) -> None:
        """Has what one worker still owes computed here."""
        for run, segment in rest:
            run.gate.fail()
            self._metrics.shared_segments.labels("given_up").inc()
            self._engine.note_loaded(self._request.request_id, (), segment.blocks)

    async def _load(self, holder: Holder, run: _Run, segment: Segment, blocks: Sequence[int]) -> list[int]:
        request_id = self._request.request_id

        async def write(layers: range, cells: Mapping[int, KVBytes]) -> None:
            await uncancelled(self._loading.load_layers(request_id, layers, cells))
            run.came(segment, layers.stop)
            if run.may_begin(self._num_layers):
                self._loading.arrive_by_layer(request_id, run.gate)

        keys = {block: self._keys[block] for block in blocks}
        with holder.use(self._request.tenant_salt) as client:
            return await holder.blocks.load_layers(
                client,
                keys,
                self._layers_at_once,
                write,
                Codec.RAW,
                request_id=request_id,
                deadline_s=self._deadline_s(segment),
            )

    def _deadline_s(self, segment: Segment) -> float:
        """How long a segment may take: by this worker's speed, or as planned for workers that slow each other down."""
        segments = self._segments
        expected_s = max(self._step_s(segment), segments.round_s)
        return min(max(segments.queue_s + _SEGMENT_FACTOR * expected_s, _LEAST_S), _MOST_S)

    def _step_s(self, segment: Segment) -> float:
        """Seconds that this worker would compute a segment for; 0 before anything was measured."""
        block_tokens = self._engine.layout.block_tokens
        return self._model.seconds(len(segment.blocks) * block_tokens, segment.blocks.start * block_tokens)

    def _patience_s(self, run: _Run) -> float:
        """How long the layers of one step may be waited for in all."""
        return _LEAST_PATIENCE_S + self._step_s(run.segments[-1])


class _Run:
    """Owns how many layers have come of segments of others, one behind the other, before one of this worker."""

    def __init__(self, segments: Sequence[Segment], num_layers: int) -> None:
        self.segments = segments
        self.blocks = range(segments[0].blocks.start, segments[-1].blocks.stop)
        self.gate = LayerGate((), num_layers, 0.0)
        self._num_layers = num_layers
        self._num_here = dict.fromkeys(segments, 0)
        self._was_begun = False

    def begin(self, first_block: int, patience_s: float) -> None:
        """Sets the gate of the blocks that the prefix cache does not have."""
        blocks = (block for block in self.blocks if block >= first_block)
        self.gate = LayerGate(blocks, self._num_layers, patience_s)

    def came(self, segment: Segment, num_layers: int) -> None:
        """Notes that the first `num_layers` layers of a segment are in memory."""
        self._num_here[segment] = num_layers
        self.gate.arrived(min(self._num_here.values()))

    def may_begin(self, num_layers: int) -> bool:
        """Whether the step behind these segments may begin now, and was not begun before: some layers of all are here.

        Where all layers are, no step needs to wait.
        """
        is_due = not self._was_begun and 0 < min(self._num_here.values()) < num_layers
        self._was_begun |= is_due
        return is_due
