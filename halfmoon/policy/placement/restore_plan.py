"""Restore: how much of a known prefix to compute from the front while the rest is loaded from the back.

Cake (arXiv 2410.03065): both sides work towards each other; the optimum is where they meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


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
    seconds: float  # predicted, from now

    @property
    def method(self) -> Literal["compute", "load", "both", "none"]:
        """The sides that have work."""
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


def plan_restore(costs: RestoreCosts, num_blocks: int, block_tokens: int) -> RestorePlan:
    """The fastest plan in whole blocks; among equals the one that computes least.

    Compares the blocks on both sides of l* with each other, and with either method alone, which does not wait for the
    queue of the other side. The plan is thus never predicted to be slower than the better method alone.
    """
    middle = meeting_point(costs, num_blocks * block_tokens) / block_tokens
    candidates = sorted({0, math.floor(middle), min(num_blocks, math.ceil(middle)), num_blocks})
    seconds = [costs.restore_s(num * block_tokens, num_blocks * block_tokens) for num in candidates]
    best = min(range(len(candidates)), key=lambda index: seconds[index])
    return RestorePlan(candidates[best], num_blocks - candidates[best], seconds[best])
