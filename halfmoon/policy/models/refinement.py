"""Latency models that follow what one worker measures while it runs, and their prediction errors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.models.contention import LearnedContention
from halfmoon.policy.models.latency import (
    NUM_COEFFICIENTS,
    USUAL_PREFILL,
    Floats,
    PrefillModel,
    PrefillSample,
    StepModel,
    StepSample,
    WorkShape,
    least_squares,
    normal_equations,
    prefill_equations,
    prefill_shape,
    step_equations,
    step_shape,
    with_shape,
)
from halfmoon.policy.models.measured_step import MeasuredStep
from halfmoon.policy.models.speculation import LearnedSpeculation, SpeculationRates

# Decay of a measurement's weight per later one: about the latest 10 prefill steps and 200 decode steps count. Both are
# seconds of work: a shared machine is as fast as it was a moment ago.
_PREFILL_FORGETTING, _STEP_FORGETTING = 0.9, 0.995
_PREFILL_CONTENTION, _STEP_CONTENTION = (0.98, 0.9), (0.998, 0.98)  # `LearnedContention`'s two
_ERROR_WINDOW = 500
_SURPRISE = 2.0  # times the prediction, to which longer steps are clipped: predicts the typical step, not the mean
_OUTLIER = 8.0  # times the prediction: a longer step may contain a pause of the machine
_MAX_OUTLIERS = 5  # in a row: more show that the model is wrong
_UNKNOWN_PREFILL, _UNKNOWN_STEP = PrefillModel(), StepModel()


class ErrorFigures(NamedTuple):
    """Errors of the latest predictions, as fractions of the measured times."""

    num: int
    mean_absolute: float
    median_absolute: float
    bias: float  # mean of predicted / measured - 1: above 0 if predictions are too high


class PredictionErrors:
    """Owns the relative errors of the latest predictions of one kind."""

    def __init__(self, window: int = _ERROR_WINDOW) -> None:
        self._errors: deque[float] = deque(maxlen=window)

    def add(self, predicted_s: float, measured_s: float) -> None:
        """Adds a prediction and its measurement, which is ignored if it is 0."""
        if measured_s > 0:
            self._errors.append(predicted_s / measured_s - 1)

    def figures(self) -> ErrorFigures:
        """Summarizes the errors; zeros if there are none."""
        if not self._errors:
            return ErrorFigures(0, 0.0, 0.0, 0.0)
        errors = np.array(self._errors)
        absolute = np.abs(errors)
        return ErrorFigures(len(errors), float(absolute.mean()), float(np.median(absolute)), float(errors.mean()))


class RecursiveFit:
    """Owns the normal equations of one model: recursive least squares with exponential forgetting.

    The start model remains as a shape, scaled to the measurements: where all prompts are alike it predicts others.
    """

    def __init__(self, shape: WorkShape, forgetting: float) -> None:
        self._forgetting = forgetting
        self._shape = shape
        self.forget()

    def forget(self) -> None:
        """Drops all measurements."""
        self._gram = np.zeros((NUM_COEFFICIENTS, NUM_COEFFICIENTS))
        self._moment = np.zeros(NUM_COEFFICIENTS)

    def add(self, features: Floats, seconds: Floats, expected: Floats) -> None:
        """Adds measurements in order: features [n, 3], seconds [n] and expected seconds [n], all positive.

        Errors count relative to the geometric mean of both, which fits about the median of scattered values. Relative
        to the measured seconds the fit would be far below it, relative to the expected ones it would be the mean.
        """
        ages: Floats = np.arange(len(seconds) - 1, -1, -1, dtype=np.float64)
        weights = np.power(self._forgetting, ages) * seconds / expected
        gram, moment = normal_equations(features, seconds, weights)
        decay = self._forgetting ** len(seconds)
        self._gram = self._gram * decay + gram
        self._moment = self._moment * decay + moment

    def coefficients(self) -> tuple[float, float, float]:
        """The non-negative fit of the measurements and the shape. There must be a measurement."""
        return least_squares(*with_shape(self._gram, self._moment, self._shape))


class RefinedModel:
    """Owns the coefficients of one model, their refinement, their contention and their errors.

    The model is that of a worker without interference. Measurements come as equations.
    """

    def __init__(
        self, start: PrefillModel | StepModel, shape: WorkShape, forgetting: float, contention: LearnedContention
    ) -> None:
        self._fit = RecursiveFit(shape, forgetting)
        self.coefficients: tuple[float, float, float] = start
        self.contention = contention
        self.errors = PredictionErrors()
        self._num_outliers = 0  # in a row

    def observe(self, features: Floats, seconds: Floats, num_busy: Floats) -> None:
        """Learns from measurements in order: features [n, 3], seconds [n], all positive; busy colocated workers [n]."""
        slowdown = 1 + self.contention.factor * num_busy
        predicted_alone = features @ np.array(self.coefficients)
        predicted = slowdown * predicted_alone
        for predicted_s, measured_s in zip(predicted.tolist(), seconds.tolist(), strict=True):
            if predicted_s > 0:  # an unknown model predicts nothing
                self.errors.add(predicted_s, measured_s)
        real = self._without_pauses(predicted, seconds)
        if not real:  # only pauses: nothing to learn from
            return
        expected = np.where(predicted > 0, predicted, seconds)
        counted = np.minimum(seconds, _SURPRISE * expected)
        self._fit.add(features[real], (counted / slowdown)[real], (expected / slowdown)[real])
        self.coefficients = self._fit.coefficients()
        known = [index for index in real if predicted[index] > 0]
        self.contention.observe((seconds[known] / predicted_alone[known]).tolist(), num_busy[known].tolist())
        changes = (features[known] @ np.array(self.coefficients)) / predicted_alone[known]
        if known and changes.all():
            self.contention.rescale(math.exp(np.log(changes).mean()))

    def _without_pauses(self, predicted: Floats, seconds: Floats) -> list[int]:
        """Indices of the measurements that count. Many long ones in a row invalidate all earlier ones."""
        real = []
        for index, is_outlier in enumerate((predicted > 0) & (seconds > _OUTLIER * predicted)):
            self._num_outliers = self._num_outliers + 1 if is_outlier else 0
            if self._num_outliers > _MAX_OUTLIERS:
                self._fit.forget()
                self._num_outliers = 0
                return list(range(index, len(seconds)))
            if not is_outlier:
                real.append(index)
        return real


class LearnedSteps(NamedTuple):
    """How many of the steps said something of each kind of work."""

    num_decodes: int
    num_prompts: int


class WorkerLatency:
    """Owns the two models of one worker, and what its guessed tokens come to."""

    def __init__(self, prefill: PrefillModel = _UNKNOWN_PREFILL, step: StepModel = _UNKNOWN_STEP) -> None:
        tokens_are_free = any(prefill) and prefill.b <= 0  # an artefact of too few measurements
        shape = prefill_shape(USUAL_PREFILL if tokens_are_free else prefill)
        self._prefill = RefinedModel(prefill, shape, _PREFILL_FORGETTING, LearnedContention(*_PREFILL_CONTENTION))
        self._step = RefinedModel(step, step_shape(step), _STEP_FORGETTING, LearnedContention(*_STEP_CONTENTION))
        self._speculation = LearnedSpeculation()

    @property
    def prefill(self) -> PrefillModel:
        """The present prefill model; zeros if unknown."""
        return PrefillModel(*self._prefill.coefficients)

    @property
    def step(self) -> StepModel:
        """The present model of a whole decode step, by rows: guesses are rows, too. Zeros if unknown."""
        return StepModel(*self._step.coefficients)

    @property
    def speculation(self) -> SpeculationRates:
        """How many tokens are guessed of late, and how many of these are right."""
        return self._speculation.rates

    @property
    def tbt(self) -> StepModel:
        """The present time between two tokens, by sequences; zeros if unknown."""
        return self.speculation.per_token(self.step)

    @property
    def errors(self) -> dict[Literal["prefill", "step"], ErrorFigures]:
        """Recent errors of each model."""
        return {"prefill": self._prefill.errors.figures(), "step": self._step.errors.figures()}

    @property
    def contention(self) -> float:
        """What each busy colocated worker adds to a prefill, as a share of its time alone."""
        return self._prefill.contention.factor

    @property
    def step_contention(self) -> float:
        """What each busy colocated worker adds to a decode step, as a share of its time alone."""
        return self._step.contention.factor

    def observe(self, steps: Sequence[MeasuredStep], num_busy: Sequence[float] = ()) -> LearnedSteps:
        """Learns from measured steps in order, with prompts and without. `num_busy` is as for `observe_prefills`."""
        pairs = list(zip(steps, num_busy or [0.0] * len(steps), strict=True))
        self._speculation.observe(steps)
        decodes = [(step.decode_sample, busy) for step, busy in pairs if not step.prefill_tokens]
        self.observe_steps([sample for sample, _ in decodes], [busy for _, busy in decodes])
        prefill, model = self.prefill, self.step
        prompts = [
            (step.prompt_sample(model), busy)
            for step, busy in pairs
            if step.prefill_tokens and step.tells_of_prompts(prefill, model)
        ]
        self.observe_prefills([sample for sample, _ in prompts], [busy for _, busy in prompts])
        return LearnedSteps(len(decodes), len(prompts))

    def observe_prefills(self, samples: Sequence[PrefillSample], num_busy: Sequence[float] = ()) -> None:
        """Learns from measured prefills in order, ignoring those with no tokens or no time.

        `num_busy` is the number of busy colocated workers during each; 0 by default.
        """
        pairs = zip(samples, num_busy or [0.0] * len(samples), strict=True)
        real = [(sample, busy) for sample, busy in pairs if sample.new_tokens > 0 and sample.seconds > 0]
        if real:
            self._prefill.observe(
                *prefill_equations([sample for sample, _ in real]), np.array([busy for _, busy in real])
            )

    def observe_steps(self, samples: Sequence[StepSample], num_busy: Sequence[float] = ()) -> None:
        """Learns from measured decode steps in order, ignoring those with no sequences or no time.

        `num_busy` is as for `observe_prefills`.
        """
        pairs = zip(samples, num_busy or [0.0] * len(samples), strict=True)
        real = [(sample, busy) for sample, busy in pairs if sample.batch > 0 and sample.seconds > 0]
        if real:
            self._step.observe(*step_equations([sample for sample, _ in real]), np.array([busy for _, busy in real]))
