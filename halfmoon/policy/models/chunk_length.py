"""How many prompt tokens a step takes beside decodes: the one rule of engine, simulator and forecasts. Pure.

As many as the tightest TBT target among the decodes leaves, by the worker's own models; without any target as many as
fit (throughput first). Prompts share steps with decodes as in Sarathi-Serve (arXiv 2403.02310), whose token budget is
a constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.policy.models.latency import PrefillModel, StepModel

_MARGIN = 0.9  # share of the target that a predicted step may take
_LEAST = 8  # a chunk has at least this part of the constant, whatever the target: prompts never starve
_MULTIPLE = 16  # of tokens: rows that matrix products compute together


class StepDecodes(NamedTuple):
    """What decodes in a step."""

    batch: float  # sequences
    context_tokens: float  # of all of them together
    target_s: float = math.inf  # the tightest TBT target; inf: nobody set one
    is_bounded: bool = False  # somebody decodes for whom the constant holds

    def with_one(self, context_tokens: float, bound_s: float | None) -> StepDecodes:
        """One more decodes, with this of `chunk_target_s`."""
        target_s = self.target_s if bound_s is None else min(self.target_s, bound_s)
        is_bounded = self.is_bounded or bound_s is None
        return StepDecodes(self.batch + 1, self.context_tokens + context_tokens, target_s, is_bounded)


NO_STEP_DECODES = StepDecodes(0, 0)


class ChunkRule(NamedTuple):
    """The worker's models; unknown: the constant holds."""

    prefill: PrefillModel = PrefillModel()
    step: StepModel = StepModel()

    @property
    def is_known(self) -> bool:
        """Whether targets determine chunks."""
        return any(self.prefill) and any(self.step)

    def tokens(self, constant: int, step_tokens: int, decodes: StepDecodes, known_tokens: float) -> int:
        """Prompt tokens of a step with at most `step_tokens` in all, whose first prompt has `known_tokens` before them.

        `constant`: where the rule is unknown, and a bound where somebody decodes for whom it holds.
        """
        if not self.is_known:
            return constant
        most = max(step_tokens - math.ceil(decodes.batch), 1)
        if decodes.is_bounded:
            most = min(most, constant)
        if decodes.target_s == math.inf:
            return most
        decode_s = self.step.seconds(decodes.batch, decodes.context_tokens)
        seconds = _MARGIN * decodes.target_s - decode_s + min(self.prefill.a, self.step.d)
        num_tokens = self._tokens_within(seconds, known_tokens)
        least = max(constant // _LEAST, 1)
        return int(min(max(num_tokens - num_tokens % _MULTIPLE, least), most)) if num_tokens < most else most

    def step_s(self, batch: float, context_tokens: float, num_tokens: float, known_tokens: float) -> float:
        """Seconds of a step with these decodes and a chunk of `num_tokens` after `known_tokens`."""
        return self.step.seconds(batch, context_tokens) + chunk_s(self.prefill, self.step, num_tokens, known_tokens)

    def slowed(self, times: float) -> ChunkRule:
        """The rule of a worker that takes `times` as long for everything."""
        return self if times == 1 else ChunkRule(self.prefill.scaled(times), self.step.scaled(times))

    def _tokens_within(self, seconds: float, known_tokens: float) -> float:
        """The length that `prefill.seconds` says takes so long after `known_tokens`."""
        a, b, c = self.prefill
        left_s, token_s = seconds - a, b + c * known_tokens
        if left_s <= 0:
            return 0.0
        slope_s = token_s + math.sqrt(token_s * token_s + 2 * c * left_s)
        return 2 * left_s / slope_s if slope_s > 0 else math.inf


CONSTANT_CHUNKS = ChunkRule()


def chunk_s(prefill: PrefillModel, step: StepModel, num_tokens: float, known_tokens: float = 0.0) -> float:
    """What a chunk adds to a step of decodes by the rule: launching kernels and reading weights is paid once."""
    return max(prefill.seconds(num_tokens, known_tokens) - min(prefill.a, step.d), 0.0)


def decodes_with_targets(batch: float, context_tokens: float, bounds_s: Iterable[float | None]) -> StepDecodes:
    """The decodes of a step whose requests carry these targets, as `chunk_target_s` gives them."""
    target_s, is_bounded = math.inf, False
    for each_s in bounds_s:
        if each_s is None:
            is_bounded = True
        elif each_s < target_s:
            target_s = each_s
    return StepDecodes(batch, context_tokens, target_s, is_bounded)


def step_decodes(batch: float, context_tokens: float, tbt_targets_s: Iterable[float | None], role: str) -> StepDecodes:
    """The decodes of a step on a worker of that role, whose requests have these targets."""
    return decodes_with_targets(batch, context_tokens, (chunk_target_s(target_s, role) for target_s in tbt_targets_s))


def chunk_target_s(tbt_target_s: float | None, role: str) -> float | None:
    """The target that a request carries to the worker it decodes on; inf for throughput first; None: constant.

    A decode worker computes prompts as an exception, so nobody's answer stops for a whole one there.
    """
    if tbt_target_s is not None and tbt_target_s < math.inf:
        return tbt_target_s
    return None if role == "decode" else math.inf
