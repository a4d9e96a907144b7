"""How long work takes: the latency models of prefill and of a decode step, and how they are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_COEFFICIENTS = 3  # of either model
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


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """The model with the least relative squared error. Without samples all of it is zero."""
    return PrefillModel(*least_squares(*normal_equations(*prefill_equations(samples))))


def fit_step(samples: Sequence[StepSample]) -> StepModel:
    """The model with the least relative squared error. Without samples all of it is zero."""
    return StepModel(*least_squares(*normal_equations(*step_equations(samples))))


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
    best, best_cost = np.zeros(NUM_COEFFICIENTS), 0.0
    usable = [index for index in range(NUM_COEFFICIENTS) if scale[index] > 0]
    for size in range(1, len(usable) + 1):
        for chosen in map(list, combinations(usable, size)):
            correlation = gram[np.ix_(chosen, chosen)] / np.outer(scale[chosen], scale[chosen])
            if np.linalg.det(correlation) < _SINGULAR:
                continue
            found = np.linalg.solve(correlation, moment[chosen] / scale[chosen]) / scale[chosen]
            cost = -float(moment[chosen] @ found)
            if (found >= 0).all() and cost < best_cost:
                best, best_cost = np.zeros(NUM_COEFFICIENTS), cost
                best[chosen] = found
    return float(best[0]), float(best[1]), float(best[2])
