"""How fast this worker computes prompts, learned from its own steps."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.engine.step_result import StepResult
from halfmoon.policy.models.latency import PrefillModel, PrefillSample
from halfmoon.policy.models.refinement import WorkerLatency


class ComputeRate:
    """Owns the prefill model of one worker's steps. Event-loop thread only."""

    def __init__(self) -> None:
        self._latency = WorkerLatency()

    @property
    def model(self) -> PrefillModel:
        """Of one step; zeros before there was one."""
        return self._latency.prefill

    def begin_with(self, samples: Sequence[PrefillSample]) -> None:
        """What calibration measured, now or at an earlier start: nothing has to be computed to know."""
        self._latency.observe_prefills(samples)

    def observe(self, result: StepResult) -> None:
        """After each step. Those that decode, too, say little of prefill."""
        if result.num_prefill_tokens and not result.num_decode_seqs:
            before = result.context_tokens - result.num_prefill_tokens
            self._latency.observe_prefills([PrefillSample(result.num_prefill_tokens, before, result.duration_s)])
