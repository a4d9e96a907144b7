"""The latency models of the workers, as their reports of steps refine them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.pb.gateway_pb2 import StepTiming
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel, StepSample, prefill_sample
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.view.cluster_view import ClusterView
from services.gateway.cluster.model_fallback import ModelFallback

_AT_ONCE = 8  # prompts that were measured here, not by the worker: so few teach at once, later ones together
_TOGETHER_S = 1.0  # of that time


class WorkerModels(NamedTuple):
    """What is to be believed of one worker."""

    prefill: PrefillModel
    step: StepModel
    contention: float
    step_contention: float


class LearnedModels:
    """Owns what is known of the speeds of kinds of workers, and of each worker the prompts that it has to learn from.

    A worker's own models belong to its member, whose `WorkerLatency` is given.
    """

    def __init__(self) -> None:
        self._prefill_models = ModelFallback[PrefillModel]()
        self._step_models = ModelFallback[StepModel]()
        self._pending: dict[str, list[PrefillSample]] = {}
        self._num_prompts: dict[str, int] = {}
        self._learned_s: dict[str, float] = {}  # when it last did

    def believed(self, worker_id: str, kind: str, latency: WorkerLatency, now_s: float) -> WorkerModels:
        """The models of one worker, or those of its kind."""
        prefill = self._prefill_models.believed(worker_id, kind, latency.prefill, now_s)
        step = self._step_models.believed(worker_id, kind, latency.step, now_s)
        return WorkerModels(prefill, step, latency.contention, latency.step_contention)

    def report(
        self,
        worker_id: str,
        kind: str,
        latency: WorkerLatency,
        steps: Sequence[StepTiming],
        view: ClusterView,
        now_s: float,
    ) -> None:
        """Steps that a worker of `view` measured. Of one that does both, prefill is what the decodes do not explain."""

        def num_busy(of_kind: Sequence[StepTiming]) -> list[float]:
            ends_s = [now_s - one.ended_before_s for one in of_kind]
            times_s = zip(of_kind, ends_s, strict=True)
            return [view.busy.mean_busy_colocated(worker_id, end_s - one.seconds, end_s) for one, end_s in times_s]

        decodes = [one for one in steps if not one.prefill_tokens]
        if decodes:
            alone = [StepSample(one.batch, one.context_tokens, one.seconds) for one in decodes]
            latency.observe_steps(alone, num_busy(decodes))
            self._step_models.note(worker_id, kind, latency.step, len(decodes), now_s)
        model = latency.step
        prefills = [one for one in steps if one.prefill_tokens]
        if prefills:
            samples = [
                prefill_sample(one.prefill_tokens, one.prefill_pairs, one.seconds - _decoding_s(one, model))
                for one in prefills
            ]
            self._learn(worker_id, kind, latency, samples, num_busy(prefills), now_s)

    def note_prompt(
        self, worker_id: str, kind: str, latency: WorkerLatency, sample: PrefillSample, now_s: float
    ) -> None:
        """A whole prompt that was measured from outside, of a worker that does not report its steps."""
        pending = self._pending.setdefault(worker_id, [])
        pending.append(sample)
        num_prompts = self._num_prompts[worker_id] = self._num_prompts.get(worker_id, 0) + 1
        if num_prompts <= _AT_ONCE or now_s - self._learned_s[worker_id] >= _TOGETHER_S:
            self._learned_s[worker_id] = now_s
            self._learn(worker_id, kind, latency, pending, [0.0] * len(pending), now_s)
            pending.clear()

    def forget(self, worker_id: str) -> None:
        """The worker is gone; what is known of its kind stays."""
        self._prefill_models.forget(worker_id)
        self._step_models.forget(worker_id)
        for of_worker in (self._pending, self._num_prompts, self._learned_s):
            of_worker.pop(worker_id, None)

    def _learn(
        self,
        worker_id: str,
        kind: str,
        latency: WorkerLatency,
        samples: Sequence[PrefillSample],
        num_busy: Sequence[float],
        now_s: float,
    ) -> None:
        latency.observe_prefills(samples, num_busy)
        self._prefill_models.note(worker_id, kind, latency.prefill, len(samples), now_s)


def _decoding_s(step: StepTiming, model: StepModel) -> float:
    return model.seconds(step.batch, step.context_tokens) if step.batch else 0.0
