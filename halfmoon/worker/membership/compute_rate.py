"""How fast this worker computes prompts, learned from its own steps."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.engine.step_result import StepResult
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, prefill_sample
from halfmoon.policy.models.refinement import WorkerLatency


class ComputeRate:
    """Owns the prefill model learned from one worker's steps. Event-loop thread only."""

    def __init__(self) -> None:
        self._latency = WorkerLatency()

    @property
    def model(self) -> PrefillModel:
        """Prefill model of one step; zeros before the first measurement."""
        return self._latency.prefill

    def begin_with(self, samples: Sequence[PrefillSample]) -> None:
        """Starts from what calibration measured, now or at an earlier start."""
        self._latency.observe_prefills(samples)

    def observe(self, result: StepResult) -> None:
        """Learns from one step. Steps that also decode are skipped: they say little about prefill."""
        if result.num_prefill_tokens and not result.num_decode_seqs:
            seconds = result.duration_s - result.layer_wait_s
            self._latency.observe_prefills(
                [prefill_sample(result.num_prefill_tokens, result.num_prefill_pairs, seconds)]
            )
