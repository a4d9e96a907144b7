"""Who decodes on a worker that computes prompts, too: each of its steps has a token of each of them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from halfmoon.policy.latency import StepModel
from halfmoon.policy.neighbours import Decoding

Life = tuple[float, float]
"""One sequence that decodes: when it ends, and its tokens on average."""


class OwnDecodes:
    """Owns who will decode on one worker, as far as that is foreseen. Is asked in the order of time."""

    def __init__(self, row: int, lives: Iterable[Life], model: StepModel) -> None:
        """`row` of the cluster view."""
        self._row = row
        self._lives = list(lives)  # a heap
        self._context_tokens = sum([tokens for _, tokens in self._lives])
        self._model = model
        heapify(self._lives)

    def decode(self, decoding: Decoding | None, now_s: float) -> None:
        """A prompt is computed, and decoded from now on; who does so elsewhere does not matter."""
        if decoding is not None and decoding.row == self._row:
            heappush(self._lives, (now_s + decoding.seconds, decoding.context_tokens))
            self._context_tokens += decoding.context_tokens

    def step_s(self, now_s: float) -> float:
        """What they take of a step that begins now; 0 where nobody is left."""
        while self._lives and self._lives[0][0] <= now_s:
            self._context_tokens -= heappop(self._lives)[1]
        return self._model.seconds(len(self._lives), self._context_tokens) if self._lives else 0.0
