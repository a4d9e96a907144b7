"""Chunks that follow targets on a worker that becomes slower or quicker than it was when it measured itself. Pure."""

from __future__ import annotations

import math
from collections import deque

from halfmoon.policy.models.chunk_length import ChunkRule, StepDecodes
from halfmoon.policy.models.measured_step import MeasuredStep
from halfmoon.policy.models.refinement import WorkerLatency

_LEARN_FROM = 4  # steps together: learning takes as long as a token of a small model
_MOST_REMEMBERED = 64  # steps that are not learned from yet


class LearnedChunkRule:
    """Owns the rule of one worker: that of its start, refined by its steps as `WorkerLatency` refines models.

    It learns only where a target is to be followed. Long pauses do not count, and a step counts as at most twice what
    was expected; a chunk stays within the bounds of `ChunkRule.tokens` whatever was measured.
    """

    def __init__(self, start: ChunkRule) -> None:
        """An unknown `start` stays unknown: the constant holds."""
        self.rule = start
        self._latency = WorkerLatency(start.prefill, start.step)
        self._measured: deque[MeasuredStep] = deque(maxlen=_MOST_REMEMBERED)

    def note(self, step: MeasuredStep) -> None:
        """Takes a step that ended. Its guessed tokens have to count as sequences: the rule knows rows."""
        if self.rule.is_known:
            self._measured.append(step)

    def tokens(self, constant: int, step_tokens: int, decodes: StepDecodes, known_tokens: float) -> int:
        """See `ChunkRule.tokens`."""
        if decodes.target_s < math.inf and len(self._measured) >= _LEARN_FROM:
            self._latency.observe(self._measured)
            self._measured.clear()
            self.rule = ChunkRule(self._latency.prefill, self._latency.step)
        return self.rule.tokens(constant, step_tokens, decodes, known_tokens)
