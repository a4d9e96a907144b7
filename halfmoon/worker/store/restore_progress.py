"""Progress of one restore: what to load next from which source, and where computing stops. No clock, no I/O.

`plan_restore` computes where both sides should meet; here the question is asked again with newer measurements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from halfmoon.policy.forecast.restore_plan import LayerLoads, RestoreCosts, RestorePlan, or_by_layer, plan_restore
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.worker.store.block_bits import bits_of, nth_in, numbers_in, span
from halfmoon.worker.store.source_progress import SourceProgress

_GAIN = 0.9  # share of the remaining time: a smaller saving is not worth a step that cannot be undone
_GAIN_OF_BOTH = 0.75  # share of the better single method's time: both disturb each other, and steps cannot be undone

_PATIENCE_SHARE = 0.5  # of the step that waits for layers
_LEAST_PATIENCE_S = 0.05


class RestoreProgress:
    """Owns how far both sides of one restore are. Blocks below `fence` are computed, the others loaded.

    A block is under way from one source at a time. What a source fails to deliver is free for the others that have it.
    Sets of blocks are bits, as in `block_bits`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        model: PrefillModel,
        sources: Sequence[SourceProgress],
        step_tokens: int = 0,
        layers: LayerLoads | None = None,
        *,
        can_do_both: bool = True,
    ) -> None:
        """Starts with everything computed; `begin` sets the fence.

        chunk_tokens: prompt tokens of one step while loading; model: prefill model of steps; step_tokens: prompt tokens
        of one step without loading, if larger; layers: of a load by layer from one source, None if no step can wait;
        can_do_both: whether computing goes on while blocks are loaded.
        """
        self.num_blocks = num_blocks
        self.fence = num_blocks
        self.sources = sources
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._step_tokens = max(step_tokens, chunk_tokens)
        self._model = model
        self._can_do_both = can_do_both
        self._layers = layers if can_do_both else None
        self.layer_source = 0  # number of the source that sends all by layer, if that was planned
        self._has_asked_by_layer = False
        self._num_computed = 0  # tokens
        self._progress_s: float | None = None
        self._free = span(0, num_blocks)  # not requested; others are under way, loaded, or to be computed
        self._loaded = 0

    @property
    def is_over(self) -> bool:
        """Whether both sides have met: no block is under way or left to ask for, and those below the fence are here."""
        is_idle = not any(source.under_way for source in self.sources)
        left = (self._free & self._available()) >> self._lowest
        return is_idle and not left and self._num_done >= min(self.fence, self.num_blocks)

    @property
    def has_sources(self) -> bool:
        """Whether a source brings blocks, or has brought some."""
        return bool(self._available())

    @property
    def num_loaded(self) -> int:
        """Number of blocks loaded."""
        return self._loaded.bit_count()

    @property
    def num_leading(self) -> int:
        """Number of leading blocks that are computed or loaded."""
        behind = self._loaded >> self._num_done
        return self._num_done + (~behind & (behind + 1)).bit_length() - 1  # up to its lowest 0

    @property
    def patience_s(self) -> float:
        """How long to wait for news before deciding again."""
        return max(2 * min((one.load_s_per_block for one in self.sources if not one.is_gone), default=0.0), 0.02)

    def advance(self, num_tokens: int, now_s: float) -> None:
        """Notes how many leading tokens are computed or loaded."""
        if num_tokens != self._num_computed or self._progress_s is None:
            self._progress_s = now_s
        self._num_computed = num_tokens

    def claim(self, now_s: float, source: int = 0) -> list[int]:
        """Claims the next blocks to request from a source, last first. None if another one delivers them sooner."""
        one, lowest = self.sources[source], self._lowest
        wanted = (self._free & one.available) >> lowest
        if self._layers is not None or not wanted:
            return []
        first = end = wanted.bit_length()
        while first and end - first < one.most_at_once and wanted >> (first - 1) & 1:
            first -= 1
        first, end = first + lowest, end + lowest
        while first < end and self._comes_sooner_from_another(one, span(first, end), lowest, now_s):
            first += 1
        self._free &= ~span(first, end)
        if first < end:
            one.ask(span(first, end), now_s)
        return list(range(end - 1, first - 1, -1))

    def claim_layers(self, now_s: float) -> list[int]:
        """Claims all blocks behind the fence, to request by layer from `layer_source`, if that was planned."""
        if self._layers is None or self._has_asked_by_layer:
            return []
        source, blocks = self.sources[self.layer_source], span(self._lowest, self.num_blocks)
        if blocks & ~source.available:
            self._layers = None
            return []
        self._has_asked_by_layer = True
        source.ask(blocks, now_s)
        self._free &= ~blocks
        return numbers_in(blocks)

    def layer_wait_s(self, share_here: float, elapsed_s: float) -> float:
        """How long layers would wait if the step behind them began now. share_here: of what arrives by layer."""
        if self._layers is None:
            return math.inf
        return self._layers.wait_s(1 - share_here, elapsed_s * (1 / share_here - 1))

    def layers_at_once(self, num_layers: int) -> int:
        """Layers of each pass over the blocks that arrive by layer."""
        return num_layers if self._layers is None else -(-num_layers // self._layers.num_passes)

    @property
    def layer_patience_s(self) -> float:
        """How long the layers of a step may wait in all."""
        return 0.0 if self._layers is None else _PATIENCE_SHARE * self._layers.step_s + _LEAST_PATIENCE_S

    def came(self, blocks: Collection[int], now_s: float, source: int = 0) -> None:
        """Notes that claimed blocks were loaded."""
        bits = bits_of(blocks)
        self.sources[source].came(bits, now_s)
        self._loaded |= bits

    def left_out(self, blocks: Collection[int], source: int = 0) -> None:
        """Notes that a source sends claimed blocks not in this call. It may be asked for them again, as others."""
        bits = bits_of(blocks)
        self._layers = None
        self.sources[source].left_out(bits)
        self._free |= bits

    def failed(self, blocks: Collection[int], source: int = 0) -> list[int]:
        """Notes that claimed blocks will not arrive from this source; returns those that no other one has."""
        bits = bits_of(blocks)
        self._layers = None if bits else self._layers
        self.sources[source].failed(bits)
        return self._released(bits)

    def drop(self, source: int) -> list[int]:
        """Asks a source for nothing more. Returns the blocks not yet claimed that no other one has."""
        self.sources[source].drop()
        return self._released(self._free)

    def replaceable(self, now_s: float) -> list[int]:
        """Sources that are so late that others should bring what is under way from them."""
        late = [number for number, source in enumerate(self.sources) if source.is_stalled(now_s)]
        return [number for number in late if not self.sources[number].under_way & ~self._available(but=number)]

    def wanted_fence(self, now_s: float) -> int:
        """The fence at which both sides would meet, by current measurements."""
        below = self._reach(now_s)
        behind = span(below, self.num_blocks)
        free = self._free & behind
        live = [source for source in self.sources if not source.is_gone]
        late = [source for source in live if source.is_stalled(now_s)]
        load_s, queue_s = self.load_s(free, now_s)
        for source in late:
            free |= source.under_way & behind
        if late and len(late) == len(live):
            load_s = queue_s = max(load_s, *(source.waited_s(now_s) for source in late))
        elif late:
            load_s, queue_s = self.load_s(free, now_s)
        if not free or not live or (self._layers is not None and not late):
            return self.fence
        costs, num_free = self.costs(below * self._block_tokens, load_s, queue_s), free.bit_count()
        if not self._can_do_both:
            compute_s = costs.compute_s((self.num_blocks - below) * self._block_tokens)
            return self.num_blocks if compute_s < _GAIN * costs.load_s(num_free * self._block_tokens) else self.fence
        plan = plan_restore(costs, num_free, self._block_tokens)
        computed = (free & span(0, self.fence)).bit_count()
        as_it_is_s = costs.restore_s(computed * self._block_tokens, num_free * self._block_tokens)
        last_s = self._model.a
        if plan.seconds + last_s >= (_GAIN if self.fence > below else _GAIN_OF_BOTH) * (as_it_is_s + last_s):
            return self.fence
        return nth_in(free, plan.num_compute_blocks) if plan.num_load_blocks else free.bit_length()

    def load_s(self, blocks: int, now_s: float) -> tuple[float, float]:
        """Seconds per block if all sources load these together, and until what is under way from them is here."""
        live = [source for source in self.sources if not source.is_gone and not source.is_stalled(now_s)]
        if not live:
            live = [source for source in self.sources if not source.is_gone]
        if not live:
            return math.inf, 0.0
        if len(live) == 1:
            return live[0].load_s_per_block, live[0].left_s(now_s)
        per_s = [1.0 / max(source.load_s_per_block, 1e-9) for source in live]
        queue_s = sum(one.left_s(now_s) * rate for one, rate in zip(live, per_s, strict=True)) / sum(per_s)
        if not blocks:
            return 1.0 / sum(per_s), queue_s
        seconds = blocks.bit_count() / sum(per_s)
        for source in live:  # some blocks are at one source alone
            others = _united(other.available for other in live if other is not source)
            alone = blocks & source.available & ~others
            seconds = max(seconds, alone.bit_count() * source.load_s_per_block)
        return seconds / blocks.bit_count(), queue_s

    def begin(self, num_here: int, costs: RestoreCosts) -> RestorePlan:
        """Sets the fence where both sides should meet, after the `num_here` leading blocks already here.

        Prefers a single method where both together would save little.
        """
        num_blocks, step_s = self.num_blocks - num_here, self._model.a
        num_tokens = num_blocks * self._block_tokens
        plan = plan_restore(costs, num_blocks, self._block_tokens)
        num_saved_steps = num_tokens / self._chunk_tokens + 1 - math.ceil(num_tokens / self._step_tokens)
        compute_s = costs.compute_s(num_tokens) - num_saved_steps * step_s
        load_s = costs.load_s(num_tokens) + step_s  # the last tokens take a step of their own
        both = replace(plan, seconds=plan.seconds + step_s)
        plan = RestorePlan(0, num_blocks, load_s) if load_s <= compute_s else RestorePlan(num_blocks, 0, compute_s)
        if self._can_do_both and both.method == "both" and both.seconds <= _GAIN_OF_BOTH * plan.seconds:
            plan = both
        plan = self._by_layer(num_here, plan)
        self.fence = num_here + plan.num_compute_blocks
        return plan

    def _by_layer(self, num_here: int, other: RestorePlan) -> RestorePlan:
        """`other`, or all by layer from one source if the first token comes clearly sooner with it."""
        if self._layers is None:
            return other
        missing, best = span(num_here, self.num_blocks), other
        until_step = replace(other, seconds=other.seconds - self._model.a)  # `begin` counts a step for the last tokens
        for number, source in enumerate(self.sources):
            if not missing & ~source.available:
                costs = self.costs(num_here * self._block_tokens, source.load_s_per_block, source.left_s(0.0))
                plan = or_by_layer(until_step, costs, self._block_tokens, self._layers, source.most_by_layer)
                if plan.is_by_layer and (not best.is_by_layer or plan.seconds < best.seconds):
                    best, self.layer_source = plan, number
        if not best.is_by_layer:
            self._layers = None
        return best

    def costs(self, num_before: int, load_s_per_block: float, load_queue_s: float) -> RestoreCosts:
        """Costs of restoring what follows the first `num_before` tokens. Computing adds the cost of one step."""
        a, b, c = self._model
        return RestoreCosts(
            compute_s_per_token=(b + a / self._chunk_tokens + c * num_before) or math.inf,
            load_s_per_token=load_s_per_block / self._block_tokens,
            compute_s_per_token2=c,
            load_queue_s=load_queue_s,
            compute_queue_s=a,
        )

    @property
    def _num_done(self) -> int:
        """Number of leading blocks that are here."""
        return self._num_computed // self._block_tokens

    @property
    def _lowest(self) -> int:
        """The first block that may still be asked for."""
        return max(self.fence, self._num_done)

    def _available(self, but: int = -1) -> int:
        """What any source has, or any other one."""
        return _united(source.available for number, source in enumerate(self.sources) if number != but)

    def _released(self, blocks: int) -> list[int]:
        """Makes blocks free for the sources that have them; returns the others, which have to be computed."""
        lost = blocks & ~self._available()
        self._free = (self._free | blocks) & ~lost
        return numbers_in(lost)

    def _comes_sooner_from_another(self, source: SourceProgress, blocks: int, lowest: int, now_s: float) -> bool:
        """Whether another source would bring all that is left before `source` brings these blocks."""
        own_s = source.left_s(now_s) + blocks.bit_count() * source.load_s_per_block
        for other in self.sources:
            if other is not source and not blocks & ~other.available and not other.is_stalled(now_s):
                num_left = ((other.available & self._free) >> lowest).bit_count()
                if other.left_s(now_s) + num_left * other.load_s_per_block < own_s:
                    return True
        return False

    def _reach(self, now_s: float) -> int:
        """The first block beyond the step that may be running."""
        costs = self.costs(self._num_computed, 0.0, 0.0)
        here = -(-self._num_computed // self._block_tokens)
        if self.fence <= here or self._progress_s is None:
            return here
        since = min((now_s - self._progress_s) / costs.compute_s_per_token, self._chunk_tokens)
        return min(self.fence, -(-int(self._num_computed + since) // self._block_tokens))


def _united(sets: Iterable[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union
