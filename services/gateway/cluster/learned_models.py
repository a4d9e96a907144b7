"""The latency models of the workers, refined by the steps that they report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.pb.gateway_pb2 import StepTiming
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel
from halfmoon.policy.models.measured_step import MeasuredStep
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.models.speculation import SpeculationRates
from halfmoon.policy.view.cluster_view import ClusterView
from services.gateway.cluster.model_fallback import ModelFallback

_LEARN_AT_ONCE = 8  # the first prompts measured here are learned from one by one, later ones in batches
_BATCH_S = 1.0


class WorkerModels(NamedTuple):
    """The latency models to use for one worker."""

    prefill: PrefillModel
    step: StepModel  # of a whole step, by rows
    contention: float
    step_contention: float
    speculation: SpeculationRates


class LearnedModels:
    """Owns the models of each kind of worker, and the measured prompts that are still to be learned from.

    A worker's own models belong to its member, which passes its `WorkerLatency`.
    """

    def __init__(self) -> None:
        self._prefill_models = ModelFallback[PrefillModel]()
        self._step_models = ModelFallback[StepModel]()
        self._pending: dict[str, list[PrefillSample]] = {}
        self._num_prompts: dict[str, int] = {}
        self._learned_s: dict[str, float] = {}  # when it last did

    def models_for(
        self, worker_id: str, kind: str, latency: WorkerLatency, now_s: float, like: Sequence[str] = ()
    ) -> WorkerModels:
        """The models of one worker, or those of its kind as long as it has too few measurements.

        A worker whose kind has computed no prompt yet computes them as fast as the kinds `like` it.
        """
        prefill = self._prefill_models.model_for(worker_id, kind, latency.prefill, now_s, like)
        step = self._step_models.model_for(worker_id, kind, latency.step, now_s)
        return WorkerModels(prefill, step, latency.contention, latency.step_contention, latency.speculation)

    def report(
        self,
        worker_id: str,
        kind: str,
        latency: WorkerLatency,
        steps: Sequence[StepTiming],
        view: ClusterView,
        now_s: float,
    ) -> None:
        """Takes the steps that a worker measured."""
        ends_s = [now_s - step.ended_before_s for step in steps]
        learned = latency.observe(
            [measured_step(step) for step in steps],
            [
                view.busy.mean_busy_colocated(worker_id, end_s - step.seconds, end_s)
                for step, end_s in zip(steps, ends_s, strict=True)
            ],
        )
        if learned.num_decodes:
            self._step_models.note(worker_id, kind, latency.step, learned.num_decodes, now_s)
        if learned.num_prompts:
            self._prefill_models.note(worker_id, kind, latency.prefill, learned.num_prompts, now_s)

    def note_prompt(
        self, worker_id: str, kind: str, latency: WorkerLatency, sample: PrefillSample, now_s: float
    ) -> None:
        """Takes a whole prompt, measured here, on a worker that does not report its steps."""
        pending = self._pending.setdefault(worker_id, [])
        pending.append(sample)
        num_prompts = self._num_prompts[worker_id] = self._num_prompts.get(worker_id, 0) + 1
        if num_prompts <= _LEARN_AT_ONCE or now_s - self._learned_s[worker_id] >= _BATCH_S:
            self._learned_s[worker_id] = now_s
            latency.observe_prefills(pending)
            self._prefill_models.note(worker_id, kind, latency.prefill, len(pending), now_s)
            pending.clear()

    def forget(self, worker_id: str) -> None:
        """Forgets a worker that left. What its kind has taught stays."""
        self._prefill_models.forget(worker_id)
        self._step_models.forget(worker_id)
        for of_worker in (self._pending, self._num_prompts, self._learned_s):
            of_worker.pop(worker_id, None)


def measured_step(timing: StepTiming) -> MeasuredStep:
    """A reported step, as the models take it."""
    return MeasuredStep(
        timing.batch,
        timing.context_tokens,
        timing.seconds,
        timing.prefill_tokens,
        timing.prefill_pairs,
        timing.drafts,
        timing.right_drafts,
    )
