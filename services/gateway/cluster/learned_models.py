"""The latency models of the workers, refined by the steps that they report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.pb.gateway_pb2 import StepTiming
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel, StepSample, prefill_sample
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.view.cluster_view import ClusterView
from services.gateway.cluster.model_fallback import ModelFallback

_LEARN_AT_ONCE = 8  # the first prompts measured here are learned from one by one, later ones in batches
_BATCH_S = 1.0


class WorkerModels(NamedTuple):
    """The latency models to use for one worker."""

    prefill: PrefillModel
    step: StepModel
    contention: float
    step_contention: float


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
        """Takes the steps that a worker measured.

        A mixed step teaches how long prompts take as `LatencyModel.stage_s` says: decodes are rows of the same matrix
        products, with attention of their own. One whose products should take less than its decodes alone teaches
        nothing of prompts: the end of a moved answer's text, a few tokens, costs less than the decodes' time varies.
        """

        def num_busy(timings: Sequence[StepTiming]) -> list[float]:
            ends_s = [now_s - step.ended_before_s for step in timings]
            times_s = zip(timings, ends_s, strict=True)
            return [view.busy.mean_busy_colocated(worker_id, end_s - step.seconds, end_s) for step, end_s in times_s]

        decodes = [step for step in steps if not step.prefill_tokens]
        if decodes:
            samples = [
                StepSample(step.batch, step.context_tokens, step.seconds / _tokens_each(step)) for step in decodes
            ]
            latency.observe_steps(samples, num_busy(decodes))
            self._step_models.note(worker_id, kind, latency.step, len(decodes), now_s)
        model, prefills, prompts = latency.step, list[StepTiming](), list[PrefillSample]()
        for step in (one for one in steps if one.prefill_tokens):
            sample = _prefill_sample(step, model)
            if not step.batch or _outweighs(sample, step, model, latency.prefill):
                prefills.append(step)
                prompts.append(sample)
        if prefills:
            self._learn(worker_id, kind, latency, prompts, num_busy(prefills), now_s)

    def note_prompt(
        self, worker_id: str, kind: str, latency: WorkerLatency, sample: PrefillSample, now_s: float
    ) -> None:
        """Takes a whole prompt, measured here, on a worker that does not report its steps."""
        pending = self._pending.setdefault(worker_id, [])
        pending.append(sample)
        num_prompts = self._num_prompts[worker_id] = self._num_prompts.get(worker_id, 0) + 1
        if num_prompts <= _LEARN_AT_ONCE or now_s - self._learned_s[worker_id] >= _BATCH_S:
            self._learned_s[worker_id] = now_s
            self._learn(worker_id, kind, latency, pending, [0.0] * len(pending), now_s)
            pending.clear()

    def forget(self, worker_id: str) -> None:
        """Forgets a worker that left. What its kind has taught stays."""
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


def _prefill_sample(step: StepTiming, model: StepModel) -> PrefillSample:
    """A step's matrix products and its prompts' attention: all of it but the attention of its decodes."""
    attention_s = _tokens_each(step) * model.f * step.context_tokens
    num_rows = step.prefill_tokens + step.batch + step.drafts
    return prefill_sample(num_rows, step.prefill_pairs, step.seconds - attention_s)


def _outweighs(sample: PrefillSample, step: StepTiming, model: StepModel, prefill: PrefillModel) -> bool:
    """Whether the step should take longer than its decodes alone, so that it says what its prompts take."""
    decoding_s = _tokens_each(step) * model.seconds(step.batch, step.context_tokens)
    return not any(prefill) or prefill.seconds(sample.new_tokens, sample.cached_tokens) >= decoding_s


def _tokens_each(step: StepTiming) -> float:
    """Tokens that the step gave each of its decoding sequences, in the mean: right guesses shorten their TBT."""
    return 1 + step.right_drafts / max(step.batch, 1)
