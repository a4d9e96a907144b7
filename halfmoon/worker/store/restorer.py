"""Restores a known prefix: loaded from the back, computed from the front, until both meet (Cake)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from halfmoon.engine.request import EngineRequest
from halfmoon.errors import DeadlineExceeded, HalfmoonError
from halfmoon.kv.codec import Codec
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_policy import kv_policy_of, num_reusable
from halfmoon.policy.forecast.restore_plan import LAYER_PASSES, LAYERS_OVERHEAD_S, LayerLoads, RestorePlan
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.store.kvstore_client import KVStoreClient, TierName
from halfmoon.worker.handover.link_codecs import LinkCodecs
from halfmoon.worker.metrics import StoreMetrics
from halfmoon.worker.serving_engine import PoolingEngine
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.awake_clock import AwakeClock
from halfmoon.worker.store.block_bits import span
from halfmoon.worker.store.holder import Holder, Holders, NamedHolder
from halfmoon.worker.store.restore_progress import RestoreProgress
from halfmoon.worker.store.restoring import Restoring, RestoringSource
from halfmoon.worker.store.source_links import HolderKind, SourceLinks
from halfmoon.worker.store.source_progress import SourceProgress

log = logging.getLogger(__name__)

_LATER_LOOKS = 4  # other answers may come so much later than the first useful one; a stopped event loop looks once
_LOOK_S = 0.005
_SHARE_FACTOR = 2.0  # another request that loads the same may be silent so many times as long as it should take
_LEAST_SHARE_S = 0.25
_SHARE_LOOK_S = 0.05


class _Answer(NamedTuple):
    holder: Holder
    tiers: Mapping[int, TierName]  # of the blocks that it has
    most_by_layer: int = 0  # blocks that it sends by layer at once

    @property
    def num_leading(self) -> int:
        """Number of leading blocks that it has."""
        return _leading(self.tiers, 0)


class Restorer:
    """Decides what to load for each prompt, and from whom. Owns the learned speeds. Event-loop thread only."""

    def __init__(
        self,
        engine: PoolingEngine,
        state: WorkerState,
        links: SourceLinks,
        metrics: StoreMetrics,
        ask_s: tuple[float, float] = (0.05, 2.0),
        clock: AwakeClock | None = None,
        num_passes: int = LAYER_PASSES,
        codecs: LinkCodecs | None = None,
    ) -> None:
        """ask_s: least and greatest limit on holders' answers about what they have.

        num_passes: of a load by layer; more hide more of it, and cost more; 1: everything is loaded by block.
        codecs: choose what blocks travel in; None: all travel raw.
        """
        self.codecs = codecs
        self.engine = engine
        self.metrics = metrics
        self._num_passes = num_passes
        self.holders = Holders(links, engine.layout)
        self._state = state
        self._ask_s = ask_s
        self._clock = clock or AwakeClock()
        self._running: dict[bytes, Restoring] = {}  # by the key of the first block that it lacks

    @property
    def has_stores(self) -> bool:
        """Whether there is a store to ask."""
        return self.holders.has_stores

    async def plan(self, request: EngineRequest, named: Sequence[NamedHolder] = ()) -> Restoring | None:
        """Plans how to restore what the prefix cache lacks; None if nothing is to be loaded.

        `named`: holders beside the worker's own store that are believed to have more of the prefix.
        """
        block_tokens = self.engine.layout.block_tokens
        num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
        policy = kv_policy_of(request.tenant_salt)
        num_whole = num_reusable(policy, num_prompt, num_prompt + num_output) // block_tokens
        if not num_whole:
            return None
        keys = self.keys(request)[:num_whole]
        async with self.holders.of(named) as holders:
            num_here = await self._once_shared(keys, self._state.cached_blocks.depth(keys))
            if num_here == num_whole or not holders:
                return None
            model = self._state.compute_rate.model
            compute_s = model.seconds((num_whole - num_here) * block_tokens, num_here * block_tokens)
            least_s, most_s = self._ask_s
            deadline_s = min(max(compute_s / 4, least_s), most_s)
            expected = {(one.address, one.kind): one.num_blocks for one in named}
            answers = await self._ask(holders, expected, request.tenant_salt, keys, num_here, deadline_s)
            num_here = await self._once_shared(keys, num_here)  # another one may have asked at the same time
            num_blocks = _leading(set[int]().union(*(answer.tiers for answer in answers)), num_here)
            if num_blocks <= num_here:
                return None
            return self._decide(request, keys[:num_blocks], answers, num_here, model)

    def keys(self, request: EngineRequest) -> list[bytes]:
        """Keys of the request's whole blocks."""
        engine, tokens = self.engine, [*request.prompt_token_ids, *request.output_token_ids]
        root = root_key(engine.fingerprint, engine.layout, request.tenant_salt)
        return block_keys(root, tokens, engine.layout.block_tokens)

    def forget(self, restoring: Restoring) -> None:
        """Notes that a restore has ended."""
        if self._running.get(restoring.first_key) is restoring:
            del self._running[restoring.first_key]

    async def _once_shared(self, keys: Sequence[bytes], num_here: int) -> int:
        """Waits for another request that loads what this one lacks; returns how many leading blocks are then here.

        Loading them twice over one link would take both of them longer.
        """
        other = self._running.get(keys[num_here]) if num_here < len(keys) else None
        if other is None:
            return num_here
        self.metrics.restore_decisions.labels("shared").inc()
        patience_s = max(_SHARE_FACTOR * other.predicted_s, _LEAST_SHARE_S)
        while not other.ended.is_set():
            left_s = min(other.last_s + patience_s - self._clock.now_s(), _SHARE_LOOK_S)
            if left_s <= 0:
                return num_here
            with suppress(TimeoutError), self._clock.waiting(left_s):
                async with asyncio.timeout(left_s):
                    await other.ended.wait()
        pairs = zip(keys, other.keys_here, strict=False)
        num_same = next((at for at, (one, its) in enumerate(pairs) if one != its), len(other.keys_here))
        return max(num_here, min(num_same, len(keys)))

    async def _ask(
        self,
        holders: Sequence[Holder],
        expected: Mapping[tuple[str, HolderKind], int],
        salt: bytes,
        keys: Sequence[bytes],
        num_here: int,
        deadline_s: float,
    ) -> list[_Answer]:
        """Asks all at once; once one answer is useful, the others have little time left.

        expected: leading blocks of the named ones, as the gateway knew it a moment ago.
        """
        leasts = [expected.get((holder.address, holder.kind), 0) for holder in holders]
        tasks = [
            asyncio.create_task(self._match(holder, min(least, len(keys)), salt, keys, deadline_s))
            for holder, least in zip(holders, leasts, strict=True)
        ]
        waiting, is_useful, num_looks = set(tasks), False, 0
        try:
            while waiting and num_looks < _LATER_LOOKS:
                limit_s = _LOOK_S if is_useful else None
                done, waiting = await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                is_useful = is_useful or any(task.result().num_leading > num_here for task in done)
                num_looks += not done
            return [task.result() for task in tasks if task.done()]
        finally:
            for task in waiting:
                task.cancel()

    async def _match(
        self, holder: Holder, least: int, salt: bytes, keys: Sequence[bytes], deadline_s: float
    ) -> _Answer:
        try:
            with holder.use(salt) as client:
                found = await client.look_up(keys, deadline_s=deadline_s)
                answer = _Answer(holder, found.tiers, found.most_by_layer)
        except HalfmoonError as error:
            outcome = "slow" if isinstance(error, DeadlineExceeded) else "away"
            self.metrics.source_answers.labels(holder.kind, outcome).inc()
            if holder is self.holders.own:
                self.metrics.restore_decisions.labels("away").inc()
            log.debug("source.away", extra={"address": holder.address, "reason": error.message})
            return _Answer(holder, {})
        if least:
            outcome = "stale" if answer.num_leading < least else "here"
            self.metrics.source_answers.labels(holder.kind, outcome).inc()
        return answer

    def _codec_of(self, holder: Holder, client: KVStoreClient) -> Codec:
        """What a holder's blocks are to travel in: exact, since they stay in the prefix cache."""
        if self.codecs is None or holder.blocks.may_lend:
            return Codec.RAW
        for codec, sizes in client.inbound.take_sizes().items():
            self.codecs.note_ratio(codec, *sizes)
        codec, reason = self.codecs.choose(client.inbound.estimators[Codec.RAW], coded=client.inbound.estimators)
        self.metrics.fetch_codecs.labels(codec.name.lower(), reason).inc()
        return codec

    def _decide(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        answers: Sequence[_Answer],
        num_here: int,
        model: PrefillModel,
    ) -> Restoring | None:
        engine, layout = self.engine, self.engine.layout
        num_blocks, sources, parts = len(keys), [], []
        usual = self.holders.usual_s_per_byte
        for holder, tiers, most_by_layer in answers:
            wanted = [block for block in range(num_here, num_blocks) if block in tiers]
            if wanted:
                s_per_byte = holder.rate.s_per_byte([tiers[block] for block in wanted], usual)
                queue_s = s_per_byte * holder.rate.bytes_under_way
                parts.append(SourceProgress(wanted, s_per_byte * layout.block_bytes, queue_s, most_by_layer))
                sources.append(RestoringSource(holder, tiers))
        progress = RestoreProgress(
            num_blocks,
            layout.block_tokens,
            engine.chunk_tokens,
            model,
            parts,
            engine.step_tokens,
            self._layer_loads(request, num_blocks, model),
            can_do_both=engine.computes_while_loading,
        )
        load_s, queue_s = progress.load_s(span(num_here, num_blocks), 0.0)
        costs = progress.costs(num_here * layout.block_tokens, load_s, queue_s)
        waiting_tokens = engine.stats_now().num_waiting_tokens
        costs = costs._replace(compute_queue_s=costs.compute_queue_s + waiting_tokens * model.b)
        plan = progress.begin(num_here, costs)
        self._note(plan)
        if not plan.num_load_blocks:
            for source in sources:
                source.holder.rate.note_passed_over()
            return None
        restoring = Restoring(
            self.engine,
            self.metrics,
            request,
            keys,
            num_here,
            sources,
            progress,
            plan.seconds,
            self.forget,
            self._clock,
            self._codec_of,
        )
        self._running.setdefault(restoring.first_key, restoring)
        return restoring

    def _layer_loads(self, request: EngineRequest, num_blocks: int, model: PrefillModel) -> LayerLoads | None:
        """What loading by layer would cost; None if no step can wait for layers."""
        engine = self.engine
        if engine.layer_loading is None:
            return None
        num_before = num_blocks * engine.layout.block_tokens
        num_new = len(request.prompt_token_ids) + len(request.output_token_ids) - num_before
        step_s = model.seconds(min(num_new, engine.step_tokens), num_before)
        return LayerLoads(step_s, min(self._num_passes, engine.layout.num_layers), LAYERS_OVERHEAD_S)

    def _note(self, plan: RestorePlan) -> None:
        self.metrics.restore_decisions.labels(plan.method).inc()
        log.info(
            "restore.planned",
            extra={
                "compute_blocks": plan.num_compute_blocks,
                "load_blocks": plan.num_load_blocks,
                "is_by_layer": plan.is_by_layer,
                "predicted_s": round(plan.seconds, 4),
            },
        )


def _leading(blocks: Container[int], first: int) -> int:
    """The first block from `first` on that is not among `blocks`."""
    while first in blocks:
        first += 1
    return first
