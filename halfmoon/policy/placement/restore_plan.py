"""Restore: how much of a known prefix to compute from the front while the rest is loaded from the back.

Cake (arXiv 2410.03065): both sides work towards each other; the optimum is where they meet. By layer (Mooncake, section
5.2): the step that computes what follows the prefix begins before all of it is there, and each layer waits for its own
KV. Both together: the front is computed, and the blocks behind it arrive by layer, during the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


class LayerLoads(NamedTuple):
    """How a prefix can be loaded while the step behind it computes."""

    step_s: float  # of the step behind the prefix
    num_passes: int  # parts of the layers; the step begins with the first one
    overhead_s: float = 0.0  # what loading by layer costs more than by block

    def hidden_s(self, load_s: float) -> float:
        """Seconds of a load that the step hides."""
        return (1 - 1 / self.num_passes) * min(load_s, self.step_s)

    def num_blocks(self, load_s_per_block: float) -> int:
        """Blocks that arrive during the step; at least one, the others before it."""
        return max(1, int(min(self.step_s / load_s_per_block, 1e6))) if load_s_per_block > 0 else 1_000_000

    def wait_s(self, share_left: float, left_s: float) -> float:
        """How long layers wait if the step begins now, and the last `share_left` of them are here after `left_s`."""
        if share_left <= 0:
            return 0.0
        last_s = left_s - self.step_s * (1 - 1 / self.num_passes)
        next_s = left_s / max(share_left * self.num_passes, 1.0) - self.step_s * (1 - share_left)
        return max(0.0, last_s, next_s)


class RestoreCosts(NamedTuple):
    """What restoring costs on one worker from one holder."""

    compute_s_per_token: float  # alpha
    load_s_per_token: float  # gamma; inf if nothing can be loaded
    compute_s_per_token2: float = 0.0  # beta: additional cost per pair of tokens
    load_queue_s: float = 0.0  # t0: until the link is free
    compute_queue_s: float = 0.0  # c0: until the device is free

    def compute_s(self, num_tokens: float) -> float:
        """Seconds until the first `num_tokens` are computed."""
        per_token_s = self.compute_s_per_token + self.compute_s_per_token2 * num_tokens / 2
        return self.compute_queue_s + num_tokens * per_token_s if num_tokens > 0 else 0.0

    def load_s(self, num_tokens: float) -> float:
        """Seconds until `num_tokens` are loaded."""
        return self.load_queue_s + num_tokens * self.load_s_per_token if num_tokens > 0 else 0.0

    def restore_s(self, num_computed: float, num_tokens: float, layers: LayerLoads | None = None) -> float:
        """Seconds until the first `num_computed` are computed and the rest of `num_tokens` is loaded.

        With `layers`, less what the step behind them hides: the step's end comes `layers.step_s` later.
        """
        num_loaded = num_tokens - num_computed
        compute_s, load_s = self.compute_s(num_computed), self.load_s(num_loaded)
        if layers is None or num_loaded <= 0:
            return max(compute_s, load_s)
        return max(compute_s, load_s - layers.hidden_s(num_loaded * self.load_s_per_token)) + layers.overhead_s


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The first blocks are computed while the others are loaded."""

    num_compute_blocks: int
    num_load_blocks: int
    seconds: float  # predicted, from now; by layer: less what the step behind the prefix hides
    num_layer_blocks: int = 0  # of those loaded, the first ones, which arrive by layer

    @property
    def method(self) -> Literal["compute", "load", "both", "none", "layers"]:
        """The sides that have work; "layers": some of what is loaded arrives by layer."""
        if self.num_layer_blocks:
            return "layers"
        if self.num_compute_blocks and self.num_load_blocks:
            return "both"
        return "compute" if self.num_compute_blocks else "load" if self.num_load_blocks else "none"


def meeting_point(costs: RestoreCosts, num_tokens: float) -> float:
    """l*: how many of `num_tokens` to compute so that both sides end at the same time; clipped to 0..num_tokens.

    `l* = (-(alpha+gamma) + sqrt((alpha+gamma)^2 + 2*beta*(gamma*n + t0 - c0))) / beta`, and for beta -> 0
    `(gamma*n + t0 - c0) / (alpha+gamma)`. Written in a form that stays exact for small beta.
    """
    ahead_s = costs.load_s_per_token * num_tokens + costs.load_queue_s - costs.compute_queue_s
    if ahead_s <= 0:
        return 0.0
    slope = costs.compute_s_per_token + costs.load_s_per_token
    if math.isinf(ahead_s) or slope + costs.compute_s_per_token2 == 0:
        return num_tokens
    root = math.sqrt(slope**2 + 2 * costs.compute_s_per_token2 * ahead_s)
    return min(num_tokens, 2 * ahead_s / (slope + root))


def plan_restore(
    costs: RestoreCosts, num_blocks: int, block_tokens: int, layers: LayerLoads | None = None
) -> RestorePlan:
    """The fastest plan in whole blocks; among equals the one that computes least. layers: None if none can wait.

    Compares the blocks on both sides of l* with each other, and with either method alone, which does not wait for the
    queue of the other side; and all this by layer with the same by block. The plan is thus never predicted to be slower
    than the better method alone.
    """
    by_block = _fastest(costs, num_blocks, block_tokens, None)
    if layers is None:
        return by_block
    by_layer = _fastest(costs, num_blocks, block_tokens, layers)
    return by_layer if by_layer.seconds < by_block.seconds else by_block


def _fastest(costs: RestoreCosts, num_blocks: int, block_tokens: int, layers: LayerLoads | None) -> RestorePlan:
    num_tokens = num_blocks * block_tokens
    middle = meeting_point(costs, num_tokens)
    if layers is not None:  # the load less what is hidden is the longer one of two lines
        share = 1 / layers.num_passes
        flat = costs._replace(load_s_per_token=costs.load_s_per_token * share)
        low = costs._replace(load_queue_s=costs.load_queue_s - (1 - share) * layers.step_s)
        middle = max(meeting_point(flat, num_tokens), meeting_point(low, num_tokens))
    middle /= block_tokens
    candidates = sorted({0, math.floor(middle), min(num_blocks, math.ceil(middle)), num_blocks})
    seconds = [costs.restore_s(num * block_tokens, num_tokens, layers) for num in candidates]
    best = min(range(len(candidates)), key=lambda index: seconds[index])
    num_loaded = num_blocks - candidates[best]
    num_by_layer = 0 if layers is None else min(num_loaded, layers.num_blocks(costs.load_s_per_token * block_tokens))
    return RestorePlan(candidates[best], num_loaded, seconds[best], num_by_layer)
