"""One restore on its way: what to load next, and where computing is to stop. No clock, no I/O.

`restore.py` says where both sides should meet; here that is asked again with what was measured since.
"""

from __future__ import annotations

import math

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.restore_plan import RestoreCosts, RestorePlan, plan_restore

_AT_ONCE_S = 0.05  # of loading in one piece: as far as a decision can be off
_MOST_AT_ONCE = 8
_EXPECTED_BLOCKS = 2
_GAIN = 0.9  # of the time that is left: what saves less is not worth a step that cannot be taken back
_GAIN_OF_BOTH = 0.85  # of the better single method's time: two sides are harder to foresee than one
_STALLED = 4.0  # times longer than expected: what is on its way is not counted on any more
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
        """chunk_tokens: of one step beside loads; model: of steps; load_s_per_block: expected.

        step_tokens: of one step where nothing is loaded, if it is larger.
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
        self._lowest = num_blocks  # blocks from here on were asked for
        self._loaded: set[int] = set()
        self._under_way: set[int] = set()
        self._since_s = 0.0  # when the last ones came, or were asked for while nothing else was
        self._busy_s = 0.0  # of the link, up to then

    @property
    def is_over(self) -> bool:
        """Whether both sides have met."""
        return not self._under_way and self._num_done >= min(self.fence, self.num_blocks)

    @property
    def num_loaded(self) -> int:
        """Blocks that came."""
        return len(self._loaded)

    @property
    def load_s_per_block(self) -> float:
        """Measured; what was expected counts as the first few."""
        return (_EXPECTED_BLOCKS * self._expected_s + self._busy_s) / (_EXPECTED_BLOCKS + len(self._loaded))

    @property
    def measured_s_per_block(self) -> float:
        """What loading a block took; 0 before there was one."""
        return self._busy_s / len(self._loaded) if self._loaded else 0.0

    @property
    def patience_s(self) -> float:
        """When to ask again although nothing was heard."""
        return max(2 * self.load_s_per_block, 0.02)

    def progress(self, num_tokens: int, now_s: float) -> None:
        """So many leading tokens are here."""
        if num_tokens != self._num_computed or self._progress_s is None:
            self._progress_s = now_s
        self._num_computed = num_tokens

    def claim(self, now_s: float) -> list[int]:
        """The next blocks to ask for, last first; they are under way from now on. Few, before the link is known."""
        in_time = int(_AT_ONCE_S / self.load_s_per_block) if self.load_s_per_block > 0 else _MOST_AT_ONCE
        most = max(1, min(in_time, len(self._loaded), _MOST_AT_ONCE))
        claimed = list(range(self._lowest - 1, max(self.fence, self._num_done, self._lowest - most) - 1, -1))
        if claimed:
            self._since_s = self._since_s if self._under_way else now_s
            self._lowest = claimed[-1]
            self._under_way.update(claimed)
        return claimed

    def came(self, blocks: list[int], now_s: float) -> None:
        """Claimed blocks that were loaded."""
        self._under_way.difference_update(blocks)
        self._loaded.update(blocks)
        self._busy_s += now_s - self._since_s
        self._since_s = now_s

    def failed(self, blocks: list[int]) -> None:
        """Claimed blocks that will not come."""
        self._under_way.difference_update(blocks)

    def wanted_fence(self, now_s: float) -> int:
        """Where both sides would meet, by what is known now."""
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
        """Puts the fence where both sides would meet, behind the first `num_here` blocks that are here.

        A single method is preferred where both together would save little.
        """
        num_blocks, step_s = self.num_blocks - num_here, self._model.a
        num_tokens = num_blocks * self._block_tokens
        plan = plan_restore(costs, num_blocks, self._block_tokens)
        num_saved_steps = num_tokens / self._chunk_tokens + 1 - math.ceil(num_tokens / self._step_tokens)
        compute_s = costs.compute_s(num_tokens) - num_saved_steps * step_s
        load_s, both_s = (
            costs.load_s(num_tokens) + step_s,
            plan.seconds + step_s,
        )  # the last tokens are a step of their own
        if plan.method != "both" or both_s > _GAIN_OF_BOTH * min(compute_s, load_s):
            plan = RestorePlan(0, num_blocks, load_s) if load_s <= compute_s else RestorePlan(num_blocks, 0, compute_s)
        self.fence = num_here + plan.num_compute_blocks
        return plan

    def costs(self, num_before: int, load_s_per_block: float, load_queue_s: float) -> RestoreCosts:
        """Of what follows the first `num_before` tokens. Computing any of it takes one step more than none."""
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
        """Leading blocks that are here."""
        return self._num_computed // self._block_tokens

    def _reach(self, now_s: float) -> int:
        """The first block that the step which may be running leaves alone."""
        costs = self.costs(self._num_computed, 0.0, 0.0)
        here = -(-self._num_computed // self._block_tokens)
        if self.fence <= here or self._progress_s is None:
            return here
        since = min((now_s - self._progress_s) / costs.compute_s_per_token, self._chunk_tokens)
        return min(self.fence, -(-int(self._num_computed + since) // self._block_tokens))
