"""How long work takes: the latency models of prefill and of a decode step, and how they are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_COEFFICIENTS = 3  # of either model
_PRIOR_SAMPLES = 0.5  # how many measurements a shape is worth
_SINGULAR = 1e-9  # determinant of a correlation matrix: features that never varied cannot be told apart


class PrefillModel(NamedTuple):
    """Seconds to compute `new` tokens after `cached` ones: `a + b*new + c*new*(cached + new/2)`.

    b is the cost of the matrix products, c that of attention: each new token sees all before it.
    """

    a: float = 0.0  # s
    b: float = 0.0  # s/token
    c: float = 0.0  # s/token^2

    def seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Prediction for one prompt. Computing nothing takes no time."""
        if new_tokens <= 0:
            return 0.0
        return self.a + self.b * new_tokens + self.c * new_tokens * (cached_tokens + new_tokens / 2)


class StepModel(NamedTuple):
    """Seconds of a decode step of `batch` sequences with `context_tokens` in all: `d + e*batch + f*context`."""

    d: float = 0.0  # s
    e: float = 0.0  # s/sequence
    f: float = 0.0  # s/token

    def seconds(self, batch: float, context_tokens: float) -> float:
        """Prediction for one step: the TBT of each sequence in it."""
        return self.d + self.e * batch + self.f * context_tokens


class PrefillSample(NamedTuple):
    """One measured prefill. `cached_tokens` below 0 is what several prompts of one step do not see of each other."""

    new_tokens: float
    cached_tokens: float
    seconds: float


def prefill_sample(num_tokens: int, num_pairs: float, seconds: float) -> PrefillSample:
    """A measured step that computed parts of several prompts: so many tokens, each with those that it attends to."""
    return PrefillSample(num_tokens, num_pairs / num_tokens - num_tokens / 2, seconds)


class StepSample(NamedTuple):
    """One measured decode step."""

    batch: float
    context_tokens: float
    seconds: float


# What is usual, in arbitrary units: where measurements do not tell coefficients apart, these do.
USUAL_PREFILL = PrefillModel(50.0, 1.0, 1e-4)  # a token costs most; 50 of them as much as a step, 10,000 pairs as one
USUAL_STEP = StepModel(20.0, 1.0, 2e-4)  # reading the weights costs most
_SHAPE_PREFILLS = tuple((new, cached) for new in (64, 512, 4096) for cached in (0, 4096))  # where a model is a shape
_SHAPE_STEPS = tuple((batch, batch * context) for batch in (1, 8, 64) for context in (128, 4096))


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """The model with the least relative squared error. Without samples all of it is zero."""
    return PrefillModel(*least_squares(*normal_equations(*prefill_equations(samples))))


def fit_step(samples: Sequence[StepSample]) -> StepModel:
    """The model with the least relative squared error. Without samples all of it is zero."""
    return StepModel(*least_squares(*normal_equations(*step_equations(samples))))


def profile_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """As `fit_prefill`, but where a few samples say little the usual shape does: no token is free."""
    equations = normal_equations(*prefill_equations(samples))
    return PrefillModel(*least_squares(*with_shape(*equations, prefill_shape(USUAL_PREFILL))))


def profile_step(samples: Sequence[StepSample]) -> StepModel:
    """As `fit_step`, but where a few samples say little the usual shape does."""
    equations = normal_equations(*step_equations(samples))
    return StepModel(*least_squares(*with_shape(*equations, step_shape(USUAL_STEP))))


class WorkShape(NamedTuple):
    """A model as normal equations that weigh little; only its proportions matter. One of zeros says nothing."""

    gram: Floats
    moment: Floats
    model: Floats  # [3]


def prefill_shape(model: PrefillModel) -> WorkShape:
    """The proportions of a model."""
    return _shape(*prefill_equations([PrefillSample(*at, model.seconds(*at)) for at in _SHAPE_PREFILLS]), model)


def step_shape(model: StepModel) -> WorkShape:
    """The proportions of a model."""
    return _shape(*step_equations([StepSample(*at, model.seconds(*at)) for at in _SHAPE_STEPS]), model)


def _shape(features: Floats, seconds: Floats, model: Sequence[float]) -> WorkShape:
    if not (seconds > 0).all():
        return WorkShape(
            np.zeros((NUM_COEFFICIENTS, NUM_COEFFICIENTS)), np.zeros(NUM_COEFFICIENTS), np.zeros(NUM_COEFFICIENTS)
        )
    weights = np.full(len(seconds), _PRIOR_SAMPLES / len(seconds))
    return WorkShape(*normal_equations(features, seconds, weights), np.array(model))


def with_shape(gram: Floats, moment: Floats, shape: WorkShape) -> tuple[Floats, Floats]:
    """The equations of measurements and of the shape, scaled to fit them best; without measurements none."""
    fitted = float(shape.model @ gram @ shape.model)
    if fitted <= 0:
        return gram, moment
    scale = float(shape.model @ moment) / fitted
    return shape.gram / scale**2 + gram, shape.moment / scale + moment


def prefill_equations(samples: Sequence[PrefillSample]) -> tuple[Floats, Floats]:
    """Features ([num_samples, 3]) and measured seconds."""
    new, cached, seconds = np.array(samples, dtype=np.float64).reshape(-1, 3).T
    return np.stack([np.ones_like(new), new, new * (cached + new / 2)], axis=1), seconds


def step_equations(samples: Sequence[StepSample]) -> tuple[Floats, Floats]:
    """Features ([num_samples, 3]) and measured seconds."""
    batch, context, seconds = np.array(samples, dtype=np.float64).reshape(-1, 3).T
    return np.stack([np.ones_like(batch), batch, context], axis=1), seconds


def normal_equations(features: Floats, seconds: Floats, weights: Floats | None = None) -> tuple[Floats, Floats]:
    """`X'WX` and `X'Wy` of the relative errors: each row counts `weights / seconds**2`. Seconds are positive."""
    scale = 1 / seconds**2 if weights is None else weights / seconds**2
    weighted = features * scale[:, None]
    return weighted.T @ features, weighted.T @ seconds


def least_squares(gram: Floats, moment: Floats) -> tuple[float, float, float]:
    """The non-negative `x` with the least `x'Gx - 2m'x`: exact, by trying each of the eight sets of positive ones.

    (Lawson and Hanson's condition: the optimum solves the unconstrained problem of the coefficients that are positive.)
    """
    scale = np.sqrt(np.diag(gram))
    usable = [index for index in range(NUM_COEFFICIENTS) if scale[index] > 0]
    found = _solved(gram, moment, scale, usable)
    if found is not None and (found >= 0).all():  # nothing constrains it: it is the best of all
        return float(found[0]), float(found[1]), float(found[2])
    best, best_cost = np.zeros(NUM_COEFFICIENTS), 0.0
    for size in range(1, len(usable)):
        for chosen in map(list, combinations(usable, size)):
            found = _solved(gram, moment, scale, chosen)
            if found is not None and (found >= 0).all() and -float(moment @ found) < best_cost:
                best, best_cost = found, -float(moment @ found)
    return float(best[0]), float(best[1]), float(best[2])


def _solved(gram: Floats, moment: Floats, scale: Floats, chosen: list[int]) -> Floats | None:
    """Without constraints, of the chosen coefficients alone; None where they cannot be told apart."""
    correlation = gram[np.ix_(chosen, chosen)] / np.outer(scale[chosen], scale[chosen])
    if not chosen or np.linalg.det(correlation) < _SINGULAR:
        return None
    found = np.zeros(NUM_COEFFICIENTS)
    found[chosen] = np.linalg.solve(correlation, moment[chosen] / scale[chosen]) / scale[chosen]
    return found
