"""Chunks that follow targets on a worker that is slower or quicker than when it measured itself, or unsteady. Pure."""

from __future__ import annotations

from collections import deque

from halfmoon.policy.models.chunk_length import ChunkRule, StepDecodes
from halfmoon.policy.models.latency import prefill_sample
from halfmoon.policy.models.measured_step import MeasuredStep

_NUM_LATEST = 64  # steps that count
_LEAST_TOKENS = 16  # prompt tokens of a step that counts: what varies in a shorter one is not the prompt's


class LearnedChunkRule:
    """Owns the rule of one worker: that of its start, as much slower as late steps with decodes and prompts were.

    The second longest of the latest 64, relative to what the start says, stands for the next one: a target is about the
    longest gaps of an answer, and a shared machine is as slow as it was a moment ago. One pause alone changes nothing.
    """

    def __init__(self, start: ChunkRule) -> None:
        """An unknown `start` stays unknown: the constant holds."""
        self.rule = start
        self._start = start
        self._slowness: deque[float] = deque(maxlen=_NUM_LATEST)  # measured seconds / those of the start

    def note(self, step: MeasuredStep) -> None:
        """Takes a step that ended. Its guessed tokens have to count as sequences: the rule knows rows."""
        if not step.batch or step.prefill_tokens < _LEAST_TOKENS or not self._start.is_known:
            return
        new_tokens, known_tokens, seconds = prefill_sample(step.prefill_tokens, step.prefill_pairs, step.seconds)
        predicted_s = self._start.step_s(step.batch, step.context_tokens, new_tokens, known_tokens)
        if seconds > 0 < predicted_s:
            self._slowness.append(seconds / predicted_s)
        if len(self._slowness) > 1:
            self.rule = self._start.slowed(sorted(self._slowness)[-2])

    def tokens(self, constant: int, step_tokens: int, decodes: StepDecodes, known_tokens: float) -> int:
        """See `ChunkRule.tokens`."""
        return self.rule.tokens(constant, step_tokens, decodes, known_tokens)
