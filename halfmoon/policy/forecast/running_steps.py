"""The running steps of all prefill workers as columns, so that one expression gives the time left of each."""

from __future__ import annotations

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


class RunningStepColumns:
    """Owns the step of each row of the cluster view as last read, and which rows must be read again."""

    def __init__(self, read: Callable[[int], RunningStep]) -> None:
        self._read = read
        self._changed: set[int] = set()
        self._steps: Floats = np.zeros((16, len(RunningStep._fields)), order="F")

    def note_changed(self, row: int) -> None:
        """Marks a row whose step may have changed."""
        self._changed.add(row)

    def left_s(self, view: ClusterView, now_s: float) -> Floats:
        """Seconds left [num_rows] of each step without interference; 0 where it may be over."""
        while len(self._steps) < max((view.num_rows, *self._changed)) + 1:
            self._steps = np.concatenate([self._steps, np.zeros_like(self._steps)])
        for row in self._changed:
            self._steps[row] = self._read(row)
        self._changed.clear()
        began_s, num_tokens, num_pairs = self._steps[: view.num_rows].T
        a, b, c = view.prefill_coefficients[: view.num_rows].T
        left_s: Floats = np.where(num_tokens > 0, began_s - now_s + a + b * num_tokens + c * num_pairs, 0.0)
        return np.maximum(left_s, 0.0, out=left_s)
