"""How long work takes: the latency models of prefill and of a decode step, and how they are fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_COEFFICIENTS = 3  # of either model
_PRIOR_SAMPLES = 0.5  # weight of a shape, in measurements
_USUAL_SAMPLES = 0.005  # of the usual shape: attention may be ten times as dear, as few measurements can show
_SINGULAR = 1e-9  # least determinant of a correlation matrix: features that never varied cannot be separated


class PrefillModel(NamedTuple):
    """Seconds to compute `new` tokens after `cached` ones: `a + b*new + c*new*(cached + new/2)`.

    b is the cost of the matrix products, c that of attention: each new token sees all before it.
    """

    a: float = 0.0  # s
    b: float = 0.0  # s/token
    c: float = 0.0  # s/token^2

    def seconds(self, new_tokens: float, cached_tokens: float = 0.0, most_seen: float = math.inf) -> float:
        """Predicts one prompt, whose tokens see at most `most_seen`; 0 if no token is new."""
        if new_tokens <= 0:
            return 0.0
        return self.a + self.b * new_tokens + self.c * num_pairs(cached_tokens, new_tokens, most_seen)

    def scaled(self, times: float) -> PrefillModel:
        """The model of a worker that takes `times` as long."""
        return PrefillModel(times * self.a, times * self.b, times * self.c)


def num_pairs(known_tokens: float, new_tokens: float, most_seen: float = math.inf) -> float:
    """Pairs of a new token and one that it attends to: all before it, but at most `most_seen`."""
    pairs = new_tokens * (known_tokens + new_tokens / 2)
    if known_tokens + new_tokens <= most_seen:
        return pairs
    return pairs - ((known_tokens + new_tokens - most_seen) ** 2 - max(known_tokens - most_seen, 0.0) ** 2) / 2


class StepModel(NamedTuple):
    """Seconds of a decode step of `batch` sequences with `context_tokens` in all: `d + e*batch + f*context`."""

    d: float = 0.0  # s
    e: float = 0.0  # s/sequence
    f: float = 0.0  # s/token

    def seconds(self, batch: float, context_tokens: float) -> float:
        """Predicts one step, which is the TBT of each sequence in it."""
        return self.d + self.e * batch + self.f * context_tokens

    def scaled(self, times: float) -> StepModel:
        """The model of a worker that takes `times` as long."""
        return StepModel(times * self.d, times * self.e, times * self.f)


class PrefillSample(NamedTuple):
    """One measured prefill. `cached_tokens` is negative if several prompts shared the step."""

    new_tokens: float
    cached_tokens: float
    seconds: float


def prefill_sample(num_tokens: int, num_pairs: float, seconds: float) -> PrefillSample:
    """The sample of a step with several prompts: its tokens, and its pairs of a token and one it attends to."""
    return PrefillSample(num_tokens, num_pairs / num_tokens - num_tokens / 2, seconds)


class StepSample(NamedTuple):
    """One measured decode step."""

    batch: float
    context_tokens: float
    seconds: float


# Usual proportions, in arbitrary units: they decide where measurements cannot separate the coefficients.
USUAL_PREFILL = PrefillModel(50.0, 1.0, 1e-4)  # a step costs as much as 50 tokens, a token as 10,000 pairs
USUAL_STEP = StepModel(20.0, 1.0, 2e-4)  # reading the weights costs most
_SHAPE_PREFILLS = tuple(
    (new, cached) for new in (64, 512, 4096) for cached in (0, 4096)
)  # points at which a model is sampled as a shape
_SHAPE_STEPS = tuple((batch, batch * context) for batch in (1, 8, 64) for context in (128, 4096))


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """The model with the least relative squared error; zeros without samples."""
    return PrefillModel(*least_squares(*normal_equations(*prefill_equations(samples))))


def fit_step(samples: Sequence[StepSample]) -> StepModel:
    """The model with the least relative squared error; zeros without samples."""
    return StepModel(*least_squares(*normal_equations(*step_equations(samples))))


def profile_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """Like `fit_prefill`, with the usual shape where few samples say little, so that no token is free."""
    equations = normal_equations(*prefill_equations(samples))
    shape = prefill_shape(USUAL_PREFILL, _weight_of_usual({sample.new_tokens for sample in samples}))
    return PrefillModel(*least_squares(*with_shape(*equations, shape)))


def profile_step(samples: Sequence[StepSample]) -> StepModel:
    """Like `fit_step`, with the usual shape where few samples say little, so that no answer is free."""
    equations = normal_equations(*step_equations(samples))
    shape = step_shape(USUAL_STEP, _weight_of_usual({sample.batch for sample in samples}))
    return StepModel(*least_squares(*with_shape(*equations, shape)))


def _weight_of_usual(sizes: set[float]) -> float:
    """Of samples of one size alone nobody knows what belongs to the size, and what to all else."""
    return _USUAL_SAMPLES if len(sizes) > 1 else _PRIOR_SAMPLES


class WorkShape(NamedTuple):
    """A model as normal equations of little weight; only its proportions matter. Zeros carry no information."""

    gram: Floats
    moment: Floats
    model: Floats  # [3]


def prefill_shape(model: PrefillModel, num_samples: float = _PRIOR_SAMPLES) -> WorkShape:
    """The shape of a model, with the weight of so many measurements."""
    samples = [PrefillSample(*at, model.seconds(*at)) for at in _SHAPE_PREFILLS]
    return _shape(*prefill_equations(samples), model, num_samples)


def step_shape(model: StepModel, num_samples: float = _PRIOR_SAMPLES) -> WorkShape:
    """The shape of a model, with the weight of so many measurements."""
    samples = [StepSample(*at, model.seconds(*at)) for at in _SHAPE_STEPS]
    return _shape(*step_equations(samples), model, num_samples)


def _shape(features: Floats, seconds: Floats, model: Sequence[float], num_samples: float) -> WorkShape:
    if not (seconds > 0).all():
        return WorkShape(
            np.zeros((NUM_COEFFICIENTS, NUM_COEFFICIENTS)), np.zeros(NUM_COEFFICIENTS), np.zeros(NUM_COEFFICIENTS)
        )
    weights = np.full(len(seconds), num_samples / len(seconds))
    return WorkShape(*normal_equations(features, seconds, weights), np.array(model))


def with_shape(gram: Floats, moment: Floats, shape: WorkShape) -> tuple[Floats, Floats]:
    """Adds the shape, scaled to fit the measurements best, to their equations; nothing without measurements."""
    fitted = float(shape.model @ gram @ shape.model)
    if fitted <= 0:
        return gram, moment
    scale = float(shape.model @ moment) / fitted
    return shape.gram / scale**2 + gram, shape.moment / scale + moment


def prefill_equations(samples: Sequence[PrefillSample]) -> tuple[Floats, Floats]:
    """Features [num_samples, 3] and measured seconds [num_samples]."""
    new, cached, seconds = np.array(samples, dtype=np.float64).reshape(-1, 3).T
    return np.stack([np.ones_like(new), new, new * (cached + new / 2)], axis=1), seconds


def step_equations(samples: Sequence[StepSample]) -> tuple[Floats, Floats]:
    """Features [num_samples, 3] and measured seconds [num_samples]."""
    batch, context, seconds = np.array(samples, dtype=np.float64).reshape(-1, 3).T
    return np.stack([np.ones_like(batch), batch, context], axis=1), seconds


def normal_equations(features: Floats, seconds: Floats, weights: Floats | None = None) -> tuple[Floats, Floats]:
    """`X'WX` and `X'Wy` of relative errors: each row weighs `weights / seconds**2`. Seconds are positive."""
    scale = 1 / seconds**2 if weights is None else weights / seconds**2
    weighted = features * scale[:, None]
    return weighted.T @ features, weighted.T @ seconds


def least_squares(gram: Floats, moment: Floats) -> tuple[float, float, float]:
    """The non-negative `x` with the least `x'Gx - 2m'x`: exact, by trying each of the eight sets of positive ones.

    (Lawson and Hanson's condition: the optimum solves the unconstrained problem of the coefficients that are positive.)
    """
    scale = np.sqrt(np.diag(gram))
    usable = [index for index in range(NUM_COEFFICIENTS) if scale[index] > 0]
    solution = _solved(gram, moment, scale, usable)
    if solution is not None and (solution >= 0).all():  # the unconstrained optimum is feasible
        return float(solution[0]), float(solution[1]), float(solution[2])
    best, best_cost = np.zeros(NUM_COEFFICIENTS), 0.0
    for size in range(1, len(usable)):
        for chosen in map(list, combinations(usable, size)):
            solution = _solved(gram, moment, scale, chosen)
            if solution is not None and (solution >= 0).all() and -float(moment @ solution) < best_cost:
                best, best_cost = solution, -float(moment @ solution)
    return float(best[0]), float(best[1]), float(best[2])


def _solved(gram: Floats, moment: Floats, scale: Floats, chosen: list[int]) -> Floats | None:
    """The unconstrained solution in the chosen coefficients; None if they cannot be separated."""
    correlation = gram[np.ix_(chosen, chosen)] / np.outer(scale[chosen], scale[chosen])
    if not chosen or np.linalg.det(correlation) < _SINGULAR:
        return None
    solution = np.zeros(NUM_COEFFICIENTS)
    solution[chosen] = np.linalg.solve(correlation, moment[chosen] / scale[chosen]) / scale[chosen]
    return solution
