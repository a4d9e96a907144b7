"""Figures over time for the last minutes: what ended in each few seconds, and how busy the workers were.

This is a ring in the gateway, not a query of the ledger. A console asks every two seconds; that must cost the same at a
thousand requests a second as at one, and must work while the ledger is unavailable. The ring ends with the gateway.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BUCKET_S = 5.0
_NUM_BUCKETS = 360  # half an hour
_EDGES_S = 1e-4 * 1.1 ** np.arange(170)  # up to about 1000 s; percentiles are right within a tenth
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_TOKENS = ("prompt_tokens", "cached_tokens", "prefill_tokens", "output_tokens")
_OUTCOMES = ("ended", "good", "refused", "failed")

Counts = NDArray[np.int64]


class Ended(NamedTuple):
    """One request that ended, however it did."""

    qos_class: str | None  # None: a bad request, which counts for no class
    is_good: bool  # complete, and within its class's targets
    refusal: str | None  # why it was rejected; None if it was not
    is_failed: bool  # admitted, and ended early by an error
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float | None
    gaps_s: Sequence[float]


class Sample(NamedTuple):
    """All workers at one moment."""

    num_running: int
    num_waiting: int
    used_share: float | None  # of the KV blocks; None without workers
    output_tokens_total: dict[str, int]  # by worker, since it started
    prefill_tokens_total: dict[str, int]


def _no_counts() -> Counts:
    return np.zeros(len(_EDGES_S) + 1, dtype=np.int64)


@dataclass(slots=True)
class _Bucket:
    """What happened in `BUCKET_S` seconds."""

    number: int
    by_class: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    ttft: Counts = field(default_factory=_no_counts)
    tbt: Counts = field(default_factory=_no_counts)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # from the workers' reports, so including requests that still run
    num_prefill_tokens: int = 0
    sample: Sample | None = None

    def total(self, outcome: str) -> int:
        """The count over all classes."""
        return sum(counts[outcome] for counts in self.by_class.values())


class Series:
    """Owns the buckets of the last half hour. Has no clock."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque(maxlen=_NUM_BUCKETS)
        self._last: Sample | None = None

    def note(self, ended: Ended, now_s: float) -> None:
        """Counts one request."""
        bucket = self._bucket(now_s)
        if ended.refusal is not None:
            bucket.refusals[ended.refusal] += 1
        if ended.qos_class is not None:
            counts = bucket.by_class.setdefault(ended.qos_class, Counter())
            counts["ended"] += 1
            counts["good"] += ended.is_good
            counts["failed"] += ended.is_failed
            counts["refused"] += ended.refusal is not None
        if ended.ttft_s is not None:
            bucket.num_prompt_tokens += ended.prompt_tokens
            bucket.num_cached_tokens += ended.cached_tokens
            _count(bucket.ttft, [ended.ttft_s])
        _count(bucket.tbt, ended.gaps_s)

    def sample(self, sample: Sample, now_s: float) -> None:
        """Takes the workers' current figures."""
        bucket = self._bucket(now_s)
        bucket.sample = sample
        if self._last is not None:
            bucket.num_output_tokens += _gained(self._last.output_tokens_total, sample.output_tokens_total)
            bucket.num_prefill_tokens += _gained(self._last.prefill_tokens_total, sample.prefill_tokens_total)
        self._last = sample

    def shown(self, now_s: float, window_s: float) -> dict[str, Any]:
        """The complete buckets of the last `window_s` seconds as columns, oldest first, and their totals."""
        last = int(now_s // BUCKET_S)
        first = max(last - int(window_s // BUCKET_S), last - _NUM_BUCKETS + 1)
        known = {bucket.number: bucket for bucket in self._buckets}
        begun = self._buckets[0].number if self._buckets else last
        buckets = [known.get(number) or _Bucket(number) for number in range(max(first, begun), last)]
        return {
            "bucket_s": BUCKET_S,
            "age_s": [now_s - (bucket.number + 0.5) * BUCKET_S for bucket in buckets],
            "rates": {name: [getattr(bucket, f"num_{name}") / BUCKET_S for bucket in buckets] for name in _TOKENS},
            "requests": {name: [bucket.total(name) / BUCKET_S for bucket in buckets] for name in _OUTCOMES},
            "ttft_s": _percentiles([bucket.ttft for bucket in buckets]),
            "tbt_s": _percentiles([bucket.tbt for bucket in buckets]),
            "refusals": _refusals(buckets),
            "num_running": [bucket.sample and bucket.sample.num_running for bucket in buckets],
            "num_waiting": [bucket.sample and bucket.sample.num_waiting for bucket in buckets],
            "used_share": [bucket.sample and bucket.sample.used_share for bucket in buckets],
            "together": _totals(buckets),
        }

    def _bucket(self, now_s: float) -> _Bucket:
        number = int(now_s // BUCKET_S)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]


def _count(counts: Counts, seconds: Iterable[float]) -> None:
    places = np.searchsorted(_EDGES_S, np.fromiter(seconds, dtype=np.float64))
    counts += np.bincount(places, minlength=len(counts))


def _gained(before: dict[str, int], now: dict[str, int]) -> int:
    """Tokens since the last sample. A worker that is new or was restarted counts from then on."""
    return sum(max(total - before[worker_id], 0) for worker_id, total in now.items() if worker_id in before)


def _percentiles(histograms: Sequence[Counts]) -> dict[str, list[float | None]]:
    return {name: [_quantile(counts, share) for counts in histograms] for name, share in QUANTILES.items()}


def _quantile(counts: Counts, share: float) -> float | None:
    """The upper edge of the quantile's bin; None without values."""
    total = int(counts.sum())
    if total == 0:
        return None
    place = int(np.searchsorted(counts.cumsum(), share * total))
    return float(_EDGES_S[min(place, len(_EDGES_S) - 1)])


def _refusals(buckets: Sequence[_Bucket]) -> dict[str, list[float]]:
    reasons = sorted({reason for bucket in buckets for reason in bucket.refusals})
    return {reason: [bucket.refusals[reason] / BUCKET_S for bucket in buckets] for reason in reasons}


def _totals(buckets: Sequence[_Bucket]) -> dict[str, Any]:
    by_class: dict[str, Counter[str]] = {}
    for bucket in buckets:
        for name, counts in bucket.by_class.items():
            by_class.setdefault(name, Counter()).update(counts)
    return {
        "seconds": len(buckets) * BUCKET_S,
        "classes": {
            name: {outcome: counts[outcome] for outcome in _OUTCOMES} for name, counts in sorted(by_class.items())
        },
        **{name: sum(getattr(bucket, f"num_{name}") for bucket in buckets) for name in _TOKENS},
        "ttft_s": _overall(bucket.ttft for bucket in buckets),
        "tbt_s": _overall(bucket.tbt for bucket in buckets),
    }


def _overall(histograms: Iterable[Counts]) -> dict[str, float | None]:
    counts = sum(histograms, _no_counts())
    return {name: _quantile(counts, share) for name, share in QUANTILES.items()}
