"""The requests that decode on a worker that also computes prompts: each of its steps has a token of each of them."""

from __future__ import annotations

import math
from collections import Counter
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from halfmoon.policy.forecast.colocated_workers import Decoding
from halfmoon.policy.models.chunk_length import NO_STEP_DECODES, StepDecodes, step_decodes
from halfmoon.policy.models.latency import Floats, StepModel
from halfmoon.policy.view.worker_view import Role


class DecodeIntervals(NamedTuple):
    """Sequences in decode, as arrays [num_sequences]."""

    ends_s: Floats
    context_tokens: Floats  # mean over the life of each
    tbt_targets_s: Floats  # inf: none


NO_DECODES = DecodeIntervals(np.zeros(0), np.zeros(0), np.zeros(0))


class ColocatedDecodes:
    """Owns which requests will decode on one worker. Must be asked in the order of time.

    Keeps only sums until the first request ends: most predictions look no further.
    """

    def __init__(self, row: int, running: DecodeIntervals, model: StepModel, role: Role = "both") -> None:
        """`row` is the worker's in the cluster view."""
        self._role = role
        self._row = row
        self._model = model
        self._first = running
        self._heap: list[tuple[float, float, float]] = []  # end, tokens and target of each, without `_first`
        self._num = len(running.ends_s)
        self._targets = Counter(running.tbt_targets_s.tolist())  # how many have each: few differ
        self._in_step: StepDecodes | None = None  # None: not asked since the last change
        self._context_tokens = float(np.add.reduce(running.context_tokens))
        self._first_end_s = float(np.minimum.reduce(running.ends_s)) if self._num else math.inf

    def begin_decode(self, decoding: Decoding | None, now_s: float) -> None:
        """Adds a request whose prompt is computed; ignores one that decodes elsewhere."""
        if decoding is not None and decoding.row == self._row:
            self._num += 1
            self._context_tokens += decoding.context_tokens
            ends_s = now_s + decoding.seconds
            self._targets[decoding.tbt_target_s] += 1
            heappush(self._heap, (ends_s, decoding.context_tokens, decoding.tbt_target_s))
            self._first_end_s = min(self._first_end_s, ends_s)
            self._in_step = None

    def step_s(self, now_s: float) -> float:
        """Decode time in a step that begins now; 0 if no request is left."""
        if self._first_end_s <= now_s:
            self._forget_ended(now_s)
        return self._model.seconds(self._num, self._context_tokens) if self._num else 0.0

    def in_step(self, now_s: float) -> StepDecodes:
        """What decodes in a step that begins now."""
        if self._first_end_s <= now_s:
            self._forget_ended(now_s)
        if self._in_step is None:
            self._in_step = step_decodes(self._num, self._context_tokens, self._targets, self._role)
        return self._in_step if any(self._model) else NO_STEP_DECODES

    def _forget_ended(self, now_s: float) -> None:
        heap = self._heap
        if self._first is not NO_DECODES:
            heap += zip(*[column.tolist() for column in self._first], strict=True)
            heapify(heap)
            self._first = NO_DECODES
        while heap and heap[0][0] <= now_s:
            _, context_tokens, target_s = heappop(heap)
            self._context_tokens -= context_tokens
            self._targets[target_s] -= 1
            if not self._targets[target_s]:
                del self._targets[target_s]
        self._num, self._in_step = len(heap), None
        self._first_end_s = heap[0][0] if heap else math.inf
