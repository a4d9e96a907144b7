"""How fast this worker computes prompts, learned from its own steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from halfmoon.engine.step_result import StepResult
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, prefill_sample
from halfmoon.policy.models.refinement import WorkerLatency

_MAX_NEW = 100  # a model forgets more than that


class ComputeRate:
    """Owns the prefill model learned from one worker's steps. Event-loop thread only.

    A step is learned from when the model is asked for: first tokens do not wait for it.
    """

    def __init__(self) -> None:
        self._latency = WorkerLatency()
        self._new: deque[PrefillSample] = deque(maxlen=_MAX_NEW)  # not learned from yet

    @property
    def model(self) -> PrefillModel:
        """Prefill model of one step; zeros before the first measurement."""
        if self._new:
            self._latency.observe_prefills(self._new)
            self._new.clear()
        return self._latency.prefill

    def begin_with(self, samples: Sequence[PrefillSample]) -> None:
        """Starts from what calibration measured, now or at an earlier start."""
        self._new.extend(samples)

    def observe(self, result: StepResult) -> None:
        """Learns from one step. Steps that also decode are skipped: they say little about prefill."""
        if result.num_prefill_tokens and not result.num_decode_seqs:
            seconds = result.duration_s - result.layer_wait_s
            self._new.append(prefill_sample(result.num_prefill_tokens, result.num_prefill_pairs, seconds))
