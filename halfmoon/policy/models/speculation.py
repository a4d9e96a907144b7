"""What guessed tokens do to decode steps: more rows a step, and more tokens. No clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.policy.models.latency import StepModel
from halfmoon.policy.models.measured_step import MeasuredStep

_FORGETTING = 0.98  # decay of a step's weight per later one: about the latest 50 count


class SpeculationRates(NamedTuple):
    """What a step has for each decoding sequence beside its newest token, in the mean."""

    drafts: float = 0.0  # guessed tokens: rows more
    right: float = 0.0  # of these, what was drawn: tokens more

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives a sequence."""
        return 1 + self.right

    def per_token(self, step: StepModel) -> StepModel:
        """Seconds between two tokens, by sequences, where `step` has those of a whole step by rows."""
        tokens = self.tokens_per_step
        return StepModel(step.d / tokens, step.e * (1 + self.drafts) / tokens, step.f / tokens)


class LearnedSpeculation:
    """Owns the rates of one worker's late steps. Knows nothing of times."""

    def __init__(self) -> None:
        self._sequences = self._drafts = self._right = 0.0  # decayed sums over steps

    @property
    def rates(self) -> SpeculationRates:
        """The present rates; zeros before the first step."""
        if not self._sequences:
            return SpeculationRates()
        return SpeculationRates(self._drafts / self._sequences, self._right / self._sequences)

    def observe(self, steps: Iterable[MeasuredStep]) -> None:
        """Learns from steps in order, ignoring those without decodes."""
        for step in steps:
            if step.batch:
                self._sequences = self._sequences * _FORGETTING + step.batch
                self._drafts = self._drafts * _FORGETTING + step.drafts
                self._right = self._right * _FORGETTING + step.right_drafts
