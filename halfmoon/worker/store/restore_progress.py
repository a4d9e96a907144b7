"""Progress of one restore: what to load next and where computing stops. No clock, no I/O.

`plan_restore` computes where both sides should meet; here the question is asked again with newer measurements.
"""

from __future__ import annotations

import math

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.restore_plan import RestoreCosts, RestorePlan, plan_restore

_AT_ONCE_S = 0.05  # seconds of loading in one call, the resolution of decisions
_MOST_AT_ONCE = 8
_EXPECTED_BLOCKS = 2
_GAIN = 0.9  # share of the remaining time: a smaller saving is not worth a step that cannot be undone
_GAIN_OF_BOTH = 0.85  # share of the better single method's time: two sides are harder to predict than one
_STALLED = 4.0  # factor over the expected time after which blocks in transit no longer count
_LEAST_STALL_S = 0.2


class RestoreProgress:
    """Owns how far both sides of one restore are. Blocks below `fence` are computed, the others loaded."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        model: PrefillModel,
        load_s_per_block: float,
        step_tokens: int = 0,
    ) -> None:
        """Starts with everything computed; `begin` sets the fence.

        chunk_tokens: prompt tokens of one step while loading; model: prefill model of steps; load_s_per_block:
        expected; step_tokens: prompt tokens of one step without loading, if larger.
        """
        self.num_blocks = num_blocks
        self.fence = num_blocks
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._step_tokens = max(step_tokens, chunk_tokens)
        self._model = model
        self._expected_s = load_s_per_block
        self._num_computed = 0  # tokens
        self._progress_s: float | None = None
        self._lowest = num_blocks  # blocks from here on have been requested
        self._loaded: set[int] = set()
        self._under_way: set[int] = set()
        self._since_s = 0.0  # last arrival, or the request that ended an idle time
        self._busy_s = 0.0  # busy time of the link until then

    @property
    def is_over(self) -> bool:
        """Whether both sides have met."""
        return not self._under_way and self._num_done >= min(self.fence, self.num_blocks)

    @property
    def num_loaded(self) -> int:
        """Number of blocks loaded."""
        return len(self._loaded)

    @property
    def load_s_per_block(self) -> float:
        """Measured seconds per block; the expected value counts as the first few measurements."""
        return (_EXPECTED_BLOCKS * self._expected_s + self._busy_s) / (_EXPECTED_BLOCKS + len(self._loaded))

    @property
    def measured_s_per_block(self) -> float:
        """Measured seconds per loaded block; 0 before the first."""
        return self._busy_s / len(self._loaded) if self._loaded else 0.0

    @property
    def patience_s(self) -> float:
        """How long to wait for news before deciding again."""
        return max(2 * self.load_s_per_block, 0.02)

    def advance(self, num_tokens: int, now_s: float) -> None:
        """Notes how many leading tokens are computed or loaded."""
        if num_tokens != self._num_computed or self._progress_s is None:
            self._progress_s = now_s
        self._num_computed = num_tokens

    def claim(self, now_s: float) -> list[int]:
        """Claims the next blocks to request, last first. Claims few until the link's speed is known."""
        in_time = int(_AT_ONCE_S / self.load_s_per_block) if self.load_s_per_block > 0 else _MOST_AT_ONCE
        most = max(1, min(in_time, len(self._loaded), _MOST_AT_ONCE))
        claimed = list(range(self._lowest - 1, max(self.fence, self._num_done, self._lowest - most) - 1, -1))
        if claimed:
            self._since_s = self._since_s if self._under_way else now_s
            self._lowest = claimed[-1]
            self._under_way.update(claimed)
        return claimed

    def came(self, blocks: list[int], now_s: float) -> None:
        """Notes that claimed blocks were loaded."""
        self._under_way.difference_update(blocks)
        self._loaded.update(blocks)
        self._busy_s += now_s - self._since_s
        self._since_s = now_s

    def failed(self, blocks: list[int]) -> None:
        """Notes that claimed blocks will not arrive."""
        self._under_way.difference_update(blocks)

    def wanted_fence(self, now_s: float) -> int:
        """The fence at which both sides would meet, by current measurements."""
        below, above = self._reach(now_s), self._lowest
        load_s, waited_s = self.load_s_per_block, now_s - self._since_s
        queue_s = max(0.0, len(self._under_way) * load_s - waited_s)
        usual_s = min(load_s, self._expected_s) * len(self._under_way)
        if self._under_way and waited_s > max(_STALLED * usual_s, _LEAST_STALL_S):
            load_s = max(load_s, waited_s)
            queue_s = load_s
            above = min(self._loaded, default=self.num_blocks)
        if above <= below:
            return self.fence
        costs = self.costs(below * self._block_tokens, load_s, queue_s)
        plan = plan_restore(costs, above - below, self._block_tokens)
        computed = min(max(self.fence, below), above) - below
        as_it_is_s = costs.restore_s(computed * self._block_tokens, (above - below) * self._block_tokens)
        return below + plan.num_compute_blocks if plan.seconds < _GAIN * as_it_is_s else self.fence

    def begin(self, num_here: int, costs: RestoreCosts) -> RestorePlan:
        """Sets the fence where both sides should meet, after the `num_here` leading blocks already here.

        Prefers a single method where both together would save little.
        """
        num_blocks, step_s = self.num_blocks - num_here, self._model.a
        num_tokens = num_blocks * self._block_tokens
        plan = plan_restore(costs, num_blocks, self._block_tokens)
        num_saved_steps = num_tokens / self._chunk_tokens + 1 - math.ceil(num_tokens / self._step_tokens)
        compute_s = costs.compute_s(num_tokens) - num_saved_steps * step_s
        load_s, both_s = (
            costs.load_s(num_tokens) + step_s,
            plan.seconds + step_s,
        )  # the last tokens take a step of their own
        if plan.method != "both" or both_s > _GAIN_OF_BOTH * min(compute_s, load_s):
            plan = RestorePlan(0, num_blocks, load_s) if load_s <= compute_s else RestorePlan(num_blocks, 0, compute_s)
        self.fence = num_here + plan.num_compute_blocks
        return plan

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

    def _reach(self, now_s: float) -> int:
        """The first block beyond the step that may be running."""
        costs = self.costs(self._num_computed, 0.0, 0.0)
        here = -(-self._num_computed // self._block_tokens)
        if self.fence <= here or self._progress_s is None:
            return here
        since = min((now_s - self._progress_s) / costs.compute_s_per_token, self._chunk_tokens)
        return min(self.fence, -(-int(self._num_computed + since) // self._block_tokens))
