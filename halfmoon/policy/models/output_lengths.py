"""How many tokens a request will generate, predicted from others of its class and prompt length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_WINDOW = 256  # latest requests of one class and size
_MIN_SAMPLES = 8  # needed for a prediction
_REFRESH = 8  # samples after which quantiles are computed again


class OutputLengths:
    """Owns the latest output lengths by class and by prompt length, in powers of two. Knows nothing of requests."""

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._lengths: dict[tuple[str, int | None], _Sample] = {}  # None: prompts of any length

    def add(self, qos_class: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Adds a completed request. Cancelled requests must not be added."""
        for size in (_size(num_prompt_tokens), None):
            self._lengths.setdefault((qos_class, size), _Sample(self._window)).add(num_output_tokens)

    def predict(self, qos_class: str, num_prompt_tokens: int, max_tokens: int, quantile: float = 0.5) -> float:
        """The quantile among prompts of about this length, or else of any length; at most `max_tokens`.

        `max_tokens` while there are too few samples.
        """
        for size in (_size(num_prompt_tokens), None):
            sample = self._lengths.get((qos_class, size))
            if sample is not None and sample.num >= _MIN_SAMPLES:
                return min(float(max_tokens), sample.quantile(quantile))
        return float(max_tokens)


class _Sample:
    """Owns the latest lengths of one kind, and their quantiles, which may lag by a few lengths."""

    def __init__(self, window: int) -> None:
        self._lengths: deque[int] = deque(maxlen=window)
        self._quantiles: dict[float, float] = {}
        self._num_new = 0

    @property
    def num(self) -> int:
        return len(self._lengths)

    def add(self, length: int) -> None:
        self._lengths.append(length)
        self._num_new += 1
        if self._num_new >= _REFRESH or self.num <= _MIN_SAMPLES:
            self._quantiles.clear()
            self._num_new = 0

    def quantile(self, quantile: float) -> float:
        if quantile not in self._quantiles:
            self._quantiles[quantile] = _quantile(sorted(self._lengths), quantile)
        return self._quantiles[quantile]


def _quantile(ascending: Sequence[int], quantile: float) -> float:
    """The quantile by linear interpolation; numpy takes ten times as long for so few values."""
    below, share = divmod(quantile * (len(ascending) - 1), 1)
    low, high = ascending[int(below)], ascending[min(int(below) + 1, len(ascending) - 1)]
    return low + share * (high - low)


def _size(num_tokens: int) -> int:
    return num_tokens.bit_length()
