"""Requests that arrive at a cluster: their times, lengths and shared prefixes, in columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST_TOKENS = 10**9
"""Limit of a prompt or an answer; more is taken for an error."""

LONGEST_S = 1e11
"""Limit of the time within which requests arrive: later times are too coarse for microseconds."""


def check_rate(rate_per_s: float) -> None:
    """Raises InvalidRequest unless requests can arrive at that rate."""
    if not 0 < rate_per_s < math.inf:
        problem = f"must be above 0 per second, and finite, got {rate_per_s:g}"
        raise InvalidRequest(f"the arrival rate {problem}", param="rate")


def check_duration(duration_s: float, advice: str, param: str) -> None:
    """Raises InvalidRequest, with `advice`, if requests arrive within longer than `LONGEST_S`."""
    if not duration_s <= LONGEST_S:
        raise InvalidRequest(
            f"the requests arrive within {duration_s:.3g} s, over {LONGEST_S:g} s: {advice}", param=param
        )


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """The ids of each prompt's blocks of `block_tokens`. Equal ids mean equal text up to and including the block.

    The ids of request `i` are `ids[offsets[i]:offsets[i + 1]]`. A prompt may have fewer ids than blocks: the rest is
    not shared. The last id may belong to a partial block, which is never shared.

    answers: the ids of the blocks that each answer completes, from the prompt's partial block on; None: no prompt has
    any of them.
    """

    block_tokens: int
    ids: Ints
    offsets: Ints  # [num_requests + 1]
    answers: Prefixes | None = None

    def of(self, index: int) -> Ints:
        """The ids of one request."""
        result: Ints = self.ids[self.offsets[index] : self.offsets[index + 1]]
        return result

    def sequence(self, index: int, prompt_tokens: int) -> list[int]:
        """The ids of all whole blocks of one request's prompt and answer."""
        num_whole = prompt_tokens // self.block_tokens
        ids: list[int] = self.of(index)[:num_whole].tolist()
        return ids if self.answers is None or len(ids) < num_whole else ids + self.answers.of(index).tolist()

    def taken(self, rows: Ints) -> Prefixes:
        """The ids of the requests `rows`."""
        answers = None if self.answers is None else self.answers.taken(rows)
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return Prefixes(self.block_tokens, self.ids[np.repeat(self.offsets[rows], counts) + within], offsets, answers)

    def repeated(self, times: int) -> Prefixes:
        """The ids of the same requests `times` times, with different ids each time."""
        every = self.ids if self.answers is None else np.concatenate([self.ids, self.answers.ids])
        step = int(every.max(initial=0)) - int(every.min(initial=0)) + 1
        answers = None if self.answers is None else self.answers._shifted(times, step)
        return replace(self._shifted(times, step), answers=answers)

    def _shifted(self, times: int, step: int) -> Prefixes:
        ids = np.concatenate([self.ids + number * step for number in range(times)])
        counts = np.tile(np.diff(self.offsets), times)
        return Prefixes(self.block_tokens, ids, np.concatenate([[0], np.cumsum(counts)]))


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival. Raises InvalidRequest for inconsistent columns."""

    start_s: Floats  # [num_requests], ascending
    prompt_tokens: Ints  # [num_requests], at least 1
    output_tokens: Ints  # [num_requests], at least 1
    prefixes: Prefixes | None = None
    name: str = field(default="workload")
    file_rows: Ints | None = None  # [num_requests]: position of each in its file; None: the same order
    tenants: Ints | None = None  # [num_requests]: number of each one's tenant; None: all are of one
    classes: Ints | None = None  # [num_requests]: position of each one's class among the cluster's; None: the first

    def __post_init__(self) -> None:
        num = len(self.start_s)
        columns = {"start_s": self.start_s, "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        for name, column in columns.items():
            _check(column.shape == (num,), name, f"has {len(column)} rows, start_s has {num}")
        _check(bool(np.isfinite(self.start_s).all()), "start_s", "must be finite")
        _check(bool((np.diff(self.start_s) >= 0).all()), "start_s", "must ascend")
        for name in ("prompt_tokens", "output_tokens"):
            too_small = np.flatnonzero(columns[name] < 1)
            _check(not len(too_small), name, f"must be at least 1, and is not in request {too_small[:1]}")
        for name, numbers in (("tenants", self.tenants), ("classes", self.classes)):
            if numbers is not None:
                _check(numbers.shape == (num,), name, f"has {len(numbers)} rows, start_s has {num}")
        if self.prefixes is not None:
            _check(len(self.prefixes.offsets) == num + 1, "prefixes", f"are of another number of requests than {num}")

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def duration_s(self) -> float:
        """From the first to the last arrival."""
        return float(self.start_s[-1] - self.start_s[0]) if len(self) else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second; 0 without two different arrival times."""
        return (len(self) - 1) / self.duration_s if self.duration_s > 0 else 0.0

    def scaled(self, factor: float) -> Workload:
        """The same requests `factor` times as fast, from second 0 on."""
        _check(factor > 0, "factor", "must be above 0")
        return replace(self, start_s=(self.start_s - self.start_s[:1]) / factor)

    def at_rate(self, rate_per_s: float) -> Workload:
        """The same requests at a mean rate of `rate_per_s`."""
        check_rate(rate_per_s)
        _check(self.rate_per_s > 0, "workload", "has not two arrival times, so it has no rate to change")
        return self.scaled(rate_per_s / self.rate_per_s)

    def repeated(self, times: int) -> Workload:
        """The same requests several times, with a mean gap between passes. Passes share no prefixes.

        There must be two different arrival times.
        """
        if times == 1:
            return self
        length_s = self.duration_s + 1 / self.rate_per_s
        return replace(
            self,
            start_s=np.concatenate([self.start_s + number * length_s for number in range(times)]),
            prompt_tokens=np.tile(self.prompt_tokens, times),
            output_tokens=np.tile(self.output_tokens, times),
            prefixes=None if self.prefixes is None else self.prefixes.repeated(times),
            file_rows=None,
            tenants=None if self.tenants is None else np.tile(self.tenants, times),
            classes=None if self.classes is None else np.tile(self.classes, times),
        )

    def arriving(self, start_s: Floats) -> Workload:
        """The same requests at other times, one for each."""
        return replace(self, start_s=start_s)

    def within(self, context_tokens: int) -> Workload:
        """The same requests, truncated to a context of `context_tokens`. What answers say is not known any more."""
        context_tokens = min(context_tokens, 2 * LONGEST_TOKENS)  # no request is longer
        prompts = np.minimum(self.prompt_tokens, max(context_tokens - 1, 1))
        outputs = np.minimum(self.output_tokens, context_tokens - prompts)
        prefixes = None if self.prefixes is None else replace(self.prefixes, answers=None)
        return replace(self, prompt_tokens=prompts, output_tokens=outputs, prefixes=prefixes)

    def taken(self, rows: Ints) -> Workload:
        """The requests `rows`, which must ascend."""
        prefixes = None if self.prefixes is None else self.prefixes.taken(rows)
        file_rows = None if self.file_rows is None else self.file_rows[rows]
        lengths = self.prompt_tokens[rows], self.output_tokens[rows]
        tenants, classes = (None if each is None else each[rows] for each in (self.tenants, self.classes))
        return Workload(self.start_s[rows], *lengths, prefixes, self.name, file_rows, tenants, classes)

    def first(self, num_requests: int) -> Workload:
        """The earliest `num_requests`, or all of them."""
        return self.taken(np.arange(min(num_requests, len(self))))


def _check(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"a workload's {param} {problem}", param=param)
