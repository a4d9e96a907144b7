"""Latency pieces through measured points: real engines have steps and bends that three coefficients cannot express."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from halfmoon.policy.models.latency import (
    PrefillModel,
    StepModel,
    StepSample,
    fit_step,
    least_squares,
    normal_equations,
)
from halfmoon.sim.latency_sources.latency_model import Piece, PrefillPiece, StepPiece, median_error


class PromptsSample(NamedTuple):
    """One measured step that computed prompts."""

    new_tokens: float  # of all prompts
    pairs: float  # sum of new * (cached + new / 2)
    seconds: float


class Line(NamedTuple):
    """From `start` on: `base + slope * x`."""

    start: float
    base: float
    slope: float


def prefill_pieces(
    samples: Sequence[PromptsSample], held_out: Sequence[PromptsSample]
) -> tuple[tuple[PrefillPiece, ...], float]:
    """Pieces, and their median relative error at the `held_out` points.

    The attention term, proportional to the pairs, is fitted over all samples. The rest is interpolated between the
    medians of equal numbers of new tokens.
    """
    new, pairs, seconds = np.array(samples, dtype=np.float64).T
    features = np.stack([np.ones_like(new), new, pairs], axis=1)
    _, _, c = least_squares(*normal_equations(features, seconds))
    lines = _through(zip(new, seconds - c * pairs, strict=True))
    pieces = tuple(Piece(line.start, PrefillModel(line.base, line.slope, c)) for line in lines)
    predicted = [_value(lines, sample.new_tokens) + c * sample.pairs for sample in held_out]
    return pieces, median_error(predicted, [sample.seconds for sample in held_out])


def step_pieces(samples: Sequence[StepSample], held_out: Sequence[StepSample]) -> tuple[tuple[StepPiece, ...], float]:
    """Pieces, and their median relative error at the `held_out` points.

    The context term is fitted; the rest is interpolated by batch size.
    """
    f = fit_step(samples).f
    lines = _through((sample.batch, sample.seconds - f * sample.context_tokens) for sample in samples)
    pieces = tuple(Piece(line.start, StepModel(line.base, line.slope, f)) for line in lines)
    predicted = [_value(lines, sample.batch) + f * sample.context_tokens for sample in held_out]
    return pieces, median_error(predicted, [sample.seconds for sample in held_out])


def _through(points: Iterable[tuple[float, float]]) -> tuple[Line, ...]:
    """Non-decreasing lines through the medians of equal x. They are flat before the first point; the last one goes
    on.
    """
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[float(x)].append(float(y))
    xs = sorted(by_x)
    ys = np.maximum(np.maximum.accumulate([float(np.median(by_x[x])) for x in xs]), 0.0).tolist()
    lines = [Line(0.0, ys[0], 0.0)]
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        slope = (y1 - y0) / (x1 - x0)
        lines.append(Line(x0, y0 - slope * x0, slope))
    return tuple(lines)


def _value(lines: Sequence[Line], x: float) -> float:
    line = max((line for line in lines if line.start <= x), key=lambda one: one.start)
    return line.base + line.slope * x
