"""Restore: how much of a known prefix to compute from the front while the rest is loaded from the back.

Cake (arXiv 2410.03065): both sides work towards each other; the optimum is where they meet. By layer (Mooncake, section
5.2): the step that computes what follows the prefix begins before all of it is there, and each layer waits for its own
KV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.view.capabilities import Bools

LAYER_PASSES = 5  # of a load by layer; more hide more of it, and cost more
LAYERS_OVERHEAD_S = 0.04  # a cautious guess: docs/log/worker.md
_LAYERS_GAIN = 0.9  # share of the time to the step's end: a smaller saving is not worth a step that waits


class LayerLoads(NamedTuple):
    """How a prefix can be loaded while the step behind it computes."""

    step_s: float  # of the step behind the prefix
    num_passes: int  # parts of the layers; the step begins with the first one
    overhead_s: float = 0.0  # what loading by layer costs more than by block

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

    def restore_s(self, num_computed: float, num_tokens: float) -> float:
        """Seconds until the first `num_computed` are computed and the rest of `num_tokens` is loaded."""
        return max(self.compute_s(num_computed), self.load_s(num_tokens - num_computed))


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The first blocks are computed while the others are loaded."""

    num_compute_blocks: int
    num_load_blocks: int
    seconds: float  # predicted, from now; by layer: less what the step behind the prefix hides
    is_by_layer: bool = False  # whether the blocks loaded arrive by layer

    @property
    def method(self) -> Literal["compute", "load", "both", "none", "layers"]:
        """The sides that have work; "layers": what is loaded arrives by layer."""
        if self.is_by_layer:
            return "layers"
        if self.num_compute_blocks and self.num_load_blocks:
            return "both"
        return "compute" if self.num_compute_blocks else "load" if self.num_load_blocks else "none"


def until_step_s(
    other_s: Floats | float,
    wait_s: Floats | float,
    load_s: Floats | float,
    step_s: Floats | float,
    num_passes: Floats | float,
    is_held: Bools | bool = True,
    overhead_s: float = LAYERS_OVERHEAD_S,
) -> Floats:
    """Seconds until the step behind a prefix may begin; less than `other_s` where all of the load comes by layer.

    By layer comes what a worker holds for one reader at once (`is_held`, by `most_of_reader`; stores hold nothing), and
    only where the step is longer than the load: with a part of it before the step, the meeting was measured to be
    sooner (docs/log/worker.md). num_passes: below 2 where no step can wait for layers.
    """
    begin_s = wait_s + load_s / np.maximum(num_passes, 1) + overhead_s
    is_sooner = np.less_equal(load_s, step_s) & (begin_s + step_s <= _LAYERS_GAIN * (other_s + step_s)) & is_held
    is_sooner &= np.less(begin_s, wait_s + load_s)
    seconds: Floats = np.where(is_sooner, begin_s, other_s)
    return seconds


def or_by_layer(
    other: RestorePlan, costs: RestoreCosts, block_tokens: int, layers: LayerLoads, most_blocks: int
) -> RestorePlan:
    """`other`, or the plan that loads everything by layer if the first token comes clearly sooner with it.

    most_blocks: that the holder holds for one reader; 0 for a store.
    """
    num_blocks = other.num_compute_blocks + other.num_load_blocks
    load_s, is_held = costs.load_s_per_token * num_blocks * block_tokens, num_blocks <= most_blocks
    wait_s, step_s, passes = costs.load_queue_s, layers.step_s, layers.num_passes
    seconds = float(until_step_s(other.seconds, wait_s, load_s, step_s, passes, is_held, layers.overhead_s))
    return RestorePlan(0, num_blocks, seconds, is_by_layer=True) if seconds < other.seconds else other


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


def plan_restore(costs: RestoreCosts, num_blocks: int, block_tokens: int) -> RestorePlan:
    """The fastest plan in whole blocks; among equals the one that computes least.

    Compares the blocks on both sides of l* with each other, and with either method alone, which does not wait for the
    queue of the other side. The plan is thus never predicted to be slower than the better method alone.
    """
    num_tokens = num_blocks * block_tokens
    middle = meeting_point(costs, num_tokens) / block_tokens
    candidates = sorted({0, math.floor(middle), min(num_blocks, math.ceil(middle)), num_blocks})
    seconds = [costs.restore_s(num * block_tokens, num_tokens) for num in candidates]
    best = min(range(len(candidates)), key=lambda index: seconds[index])
    return RestorePlan(candidates[best], num_blocks - candidates[best], seconds[best])
