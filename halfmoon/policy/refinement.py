"""Latency models that follow what one worker measures while it runs, and how wrong they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.latency import (
    NUM_COEFFICIENTS,
    Floats,
    PrefillModel,
    PrefillSample,
    StepModel,
    StepSample,
    least_squares,
    normal_equations,
    prefill_equations,
    step_equations,
)

# Weight of a measurement once there is a next one: about the last 20 prefill steps and the last 50 decode steps count,
# seconds of them, for a machine that others use is as fast as it was a moment ago.
_PREFILL_FORGETTING, _STEP_FORGETTING = 0.95, 0.98
_PRIOR_SAMPLES = 0.5  # how many measurements the shape of the model at the start is worth, for ever
_PRIOR_PREFILLS = tuple((new, cached) for new in (64, 512, 4096) for cached in (0, 4096))  # where it is believed
_PRIOR_STEPS = tuple((batch, batch * context) for batch in (1, 8, 64) for context in (128, 4096))
_ERROR_WINDOW = 500
_SURPRISE = 2.0  # times the prediction: what took longer counts as that; the typical one is predicted, not the mean
_OUTLIER = 8.0  # times the prediction: what took longer may have been a pause of the machine
_MAX_OUTLIERS = 5  # one after the other: it was the model that was wrong


class ErrorFigures(NamedTuple):
    """Of the latest predictions against what was measured; fractions of the measured."""

    num: int
    mean_absolute: float
    median_absolute: float
    bias: float  # mean of predicted / measured - 1: above 0 where it predicts too much


class PredictionErrors:
    """Owns the relative errors of the latest predictions of one kind."""

    def __init__(self, window: int = _ERROR_WINDOW) -> None:
        self._errors: deque[float] = deque(maxlen=window)

    def add(self, predicted_s: float, measured_s: float) -> None:
        """Notes one prediction and what came of it; nothing is measured in no time."""
        if measured_s > 0:
            self._errors.append(predicted_s / measured_s - 1)

    def figures(self) -> ErrorFigures:
        """Zeros as long as there are none."""
        if not self._errors:
            return ErrorFigures(0, 0.0, 0.0, 0.0)
        errors = np.array(self._errors)
        absolute = np.abs(errors)
        return ErrorFigures(len(errors), float(absolute.mean()), float(np.median(absolute)), float(errors.mean()))


class RecursiveFit:
    """Owns the normal equations of one model: recursive least squares with exponential forgetting.

    The model at the start lasts as a shape, scaled by what is measured: where all prompts are alike it says what
    others would take.
    """

    def __init__(self, start: tuple[Floats, Floats] | None, forgetting: float) -> None:
        self._forgetting = forgetting
        self._start_gram, self._start_moment = _start_equations(start)
        self._start_model = np.array(least_squares(self._start_gram, self._start_moment))
        self.forget()

    def forget(self) -> None:
        """Back to the start."""
        self._gram = np.zeros((NUM_COEFFICIENTS, NUM_COEFFICIENTS))
        self._moment = np.zeros(NUM_COEFFICIENTS)

    def add(self, features: Floats, seconds: Floats, expected: Floats) -> None:
        """Measurements in their order: features [n, 3], seconds [n] and what was expected of them, all positive.

        Errors count relative to the geometric mean of both: the fit of values that scatter is then about their median.
        Relative to what came it would be far below, relative to what was expected it would be their mean.
        """
        ages: Floats = np.arange(len(seconds) - 1, -1, -1, dtype=np.float64)
        weights = np.power(self._forgetting, ages) * seconds / expected
        gram, moment = normal_equations(features, seconds, weights)
        decay = self._forgetting ** len(seconds)
        self._gram = self._gram * decay + gram
        self._moment = self._moment * decay + moment

    def coefficients(self) -> tuple[float, float, float]:
        """The non-negative fit of what was added, and of the start."""
        scale = self._scale()
        return least_squares(self._start_gram / scale**2 + self._gram, self._start_moment / scale + self._moment)

    def _scale(self) -> float:
        """What the start has to be multiplied by to fit the measurements best."""
        fitted = float(self._start_model @ self._gram @ self._start_model)
        return float(self._start_model @ self._moment) / fitted if fitted > 0 else 1.0


class RefinedModel:
    """Owns one model's coefficients, their refinement and their errors. Measurements come as equations."""

    def __init__(self, start: tuple[Floats, Floats] | None, forgetting: float) -> None:
        self._fit = RecursiveFit(start, forgetting)
        self.coefficients = self._fit.coefficients()
        self.errors = PredictionErrors()
        self._num_outliers = 0  # one after the other

    def observe(self, features: Floats, seconds: Floats) -> None:
        """Measurements in their order: features [n, 3], seconds [n], all positive."""
        predicted = features @ np.array(self.coefficients)
        for predicted_s, measured_s in zip(predicted.tolist(), seconds.tolist(), strict=True):
            if predicted_s > 0:  # a model without measurements has predicted nothing
                self.errors.add(predicted_s, measured_s)
        real = self._without_pauses(predicted, seconds)
        expected = np.where(predicted > 0, predicted, seconds)
        counted = np.minimum(seconds, _SURPRISE * expected)
        self._fit.add(features[real], counted[real], expected[real])
        self.coefficients = self._fit.coefficients()

    def _without_pauses(self, predicted: Floats, seconds: Floats) -> list[int]:
        """Which measurements count. After many that took far too long, all before them was wrong."""
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


class WorkerLatency:
    """Owns the two models of one worker."""

    def __init__(self, prefill: PrefillModel | None = None, step: StepModel | None = None) -> None:
        self._prefill = RefinedModel(prefill and prefill_equations(_prefills_by(prefill)), _PREFILL_FORGETTING)
        self._step = RefinedModel(step and step_equations(_steps_by(step)), _STEP_FORGETTING)

    @property
    def prefill(self) -> PrefillModel:
        """The model of prefill as of now; zeros before anything is known."""
        return PrefillModel(*self._prefill.coefficients)

    @property
    def step(self) -> StepModel:
        """The model of decode steps as of now; zeros before anything is known."""
        return StepModel(*self._step.coefficients)

    @property
    def errors(self) -> dict[Literal["prefill", "step"], ErrorFigures]:
        """How wrong each model was lately."""
        return {"prefill": self._prefill.errors.figures(), "step": self._step.errors.figures()}

    def observe_prefills(self, samples: Iterable[PrefillSample]) -> None:
        """Measured prefills, in their order; those of nothing, or in no time, are none."""
        real = [one for one in samples if one.new_tokens > 0 and one.seconds > 0]
        if real:
            self._prefill.observe(*prefill_equations(real))

    def observe_steps(self, samples: Iterable[StepSample]) -> None:
        """Measured decode steps, in their order; those of nothing, or in no time, are none."""
        real = [one for one in samples if one.batch > 0 and one.seconds > 0]
        if real:
            self._step.observe(*step_equations(real))


def _prefills_by(model: PrefillModel) -> Sequence[PrefillSample]:
    return [PrefillSample(new, cached, model.seconds(new, cached)) for new, cached in _PRIOR_PREFILLS]


def _steps_by(model: StepModel) -> Sequence[StepSample]:
    return [StepSample(batch, context, model.seconds(batch, context)) for batch, context in _PRIOR_STEPS]


def _start_equations(start: tuple[Floats, Floats] | None) -> tuple[Floats, Floats]:
    if start is None or not (start[1] > 0).all():
        return np.zeros((NUM_COEFFICIENTS, NUM_COEFFICIENTS)), np.zeros(NUM_COEFFICIENTS)
    features, seconds = start
    return normal_equations(features, seconds, np.full(len(seconds), _PRIOR_SAMPLES / len(seconds)))
