"""The running steps of all prefill workers as columns, so that one expression gives the time left of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.view.cluster_view import ClusterView


class RunningStep(NamedTuple):
    """A step in progress."""

    began_s: float
    num_tokens: float  # 0 if no step is running
    num_pairs: float  # of a token and one it attends to
    most_nested: float  # tokens of a prompt that need not wait for it; inf if no step is running


NO_STEP = RunningStep(0.0, 0.0, 0.0, math.inf)


class RunningStepColumns:
    """Owns the step of each row of the cluster view as last read, and which rows must be read again."""

    def __init__(self, read: Callable[[int], RunningStep]) -> None:
        self._read = read
        self._changed: set[int] = set()
        self._steps = _no_steps(16)

    def note_changed(self, row: int) -> None:
        """Marks a row whose step may have changed."""
        self._changed.add(row)

    def left_s(self, view: ClusterView, num_tokens: Floats, now_s: float) -> Floats:
        """Seconds [num_rows] that a prompt waits for each running step, at least, without interference.

        `num_tokens` [num_rows] would be computed of it there. It waits for none that may be over or may nest it.
        """
        while len(self._steps) < max((view.num_rows, *self._changed)) + 1:
            self._steps = np.concatenate([self._steps, _no_steps(len(self._steps))])
        for row in self._changed:
            self._steps[row] = self._read(row)
        self._changed.clear()
        began_s, step_tokens, num_pairs, most_nested = self._steps[: view.num_rows].T
        a, b, c = view.prefill_coefficients[: view.num_rows].T
        waits = num_tokens > most_nested
        left_s: Floats = np.where(waits, began_s - now_s + a + b * step_tokens + c * num_pairs, 0.0)
        return np.maximum(left_s, 0.0, out=left_s)


def _no_steps(num_rows: int) -> Floats:
    steps = np.zeros((num_rows, len(RunningStep._fields)), order="F")
    steps[:] = NO_STEP
    return steps
