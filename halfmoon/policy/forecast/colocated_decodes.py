"""Who decodes on a worker that computes prompts, too: each of its steps has a token of each of them."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from halfmoon.policy.forecast.colocated_workers import Decoding
from halfmoon.policy.models.latency import Floats, StepModel


class DecodeIntervals(NamedTuple):
    """Sequences that decode."""

    ends_s: Floats
    context_tokens: Floats  # of each, on average


NO_LIVES = DecodeIntervals(np.zeros(0), np.zeros(0))


class ColocatedDecodes:
    """Owns who will decode on one worker, as far as that is foreseen. Is asked in the order of time.

    Until the first of them ends only their sums are known: most predictions look no further.
    """

    def __init__(self, row: int, lives: DecodeIntervals, model: StepModel) -> None:
        """`row` of the cluster view."""
        self._row = row
        self._model = model
        self._first = lives
        self._heap: list[tuple[float, float]] = []  # when each ends, and its tokens; not of `_first`
        self._num = len(lives.ends_s)
        self._context_tokens = float(np.add.reduce(lives.context_tokens))
        self._first_end_s = float(np.minimum.reduce(lives.ends_s)) if self._num else math.inf

    def decode(self, decoding: Decoding | None, now_s: float) -> None:
        """A prompt is computed, and decoded from now on; who does so elsewhere does not matter."""
        if decoding is not None and decoding.row == self._row:
            self._num += 1
            self._context_tokens += decoding.context_tokens
            ends_s = now_s + decoding.seconds
            heappush(self._heap, (ends_s, decoding.context_tokens))
            self._first_end_s = min(self._first_end_s, ends_s)

    def step_s(self, now_s: float) -> float:
        """What they take of a step that begins now; 0 where nobody is left."""
        if self._first_end_s <= now_s:
            self._forget_ended(now_s)
        return self._model.seconds(self._num, self._context_tokens) if self._num else 0.0

    def _forget_ended(self, now_s: float) -> None:
        heap = self._heap
        if self._first is not NO_LIVES:
            heap += zip(self._first.ends_s.tolist(), self._first.context_tokens.tolist(), strict=True)
            heapify(heap)
            self._first = NO_LIVES
        while heap and heap[0][0] <= now_s:
            self._context_tokens -= heappop(heap)[1]
        self._num = len(heap)
        self._first_end_s = heap[0][0] if heap else math.inf
