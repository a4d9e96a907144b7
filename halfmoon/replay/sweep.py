"""A sweep over request rates or numbers of sessions at once, on one server or several by turns.

With several servers each point is measured on one after the other, and the order changes from point to point and from
round to round, so that drifts of the machine affect all alike. The first server is the control arm.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfmoon.plan.search.bisect import highest_feasible
from halfmoon.replay.bench_load import BenchLoad, Sent
from halfmoon.replay.client import Gateway
from halfmoon.replay.outcome import ReplayTargets, Summary, summarized

_LOWEST = 1 / 64  # of the rate that a search starts at
_LONGER = 6.0  # a search's points take at most so many times as long as its first one
_ONE_AT_A_TIME = 0.0  # what `on_begin` is told of requests that are no point
_REQUESTS_APART = 1 << 20  # between seeds: prompts of different seeds share nothing
_SEEDS_APART = 10_007  # between rounds, whose lengths and arrivals differ
_HALF = 0.5  # of the share that is wanted: fewer of a few requests in time show that no rate is kept
_SETTLE_S = 1.0  # between two servers' turns: threads that wait for work spin for up to a fifth of a second


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How points are measured and judged."""

    targets: ReplayTargets
    attainment: float  # share of requests in time that makes a point one that is kept
    seed: int = 0
    num_rounds: int = 1  # turns of each server at each point


@dataclass(frozen=True, slots=True)
class Point:
    """One server at one rate, or with so many sessions at once."""

    server: str
    value: float
    is_kept: bool
    summary: Summary
    output_tokens_per_s: float  # until the last answer ended
    jobs_per_hour: float = 0.0  # sessions of which all turns were answered
    jobs_in_time_per_hour: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "server": self.server,
            "value": self.value,
            "is_kept": self.is_kept,
            "output_tokens_per_s": self.output_tokens_per_s,
            "jobs_per_hour": self.jobs_per_hour,
            "jobs_in_time_per_hour": self.jobs_in_time_per_hour,
            **self.summary.as_json(),
        }


@dataclass(slots=True)
class Sweep:
    """Owns the points measured so far. Every prompt is new: a cache helps a session's turns only, and what a trace's
    requests share.

    - on_begin: called with a server, its point and the number of requests; the point 0 is one request at a time.
    - least: where a search ends downwards; 0: none was begun.
    - alone: figures of servers that were asked for one request at a time, since they did not keep a search's start.
    """

    servers: Sequence[Gateway]
    load: BenchLoad
    options: SweepOptions
    on_begin: Callable[[str, float, int], None] = lambda server, value, num_requests: None
    points: list[Point] = field(default_factory=list)
    least: float = 0.0
    alone: dict[str, Summary] = field(default_factory=dict)
    _num_sent: int = 0
    _num_turns: int = 0

    def measure(self, value: float, servers: Sequence[Gateway] | None = None) -> None:
        """Measures one point on all of `servers` (default: all), by turns."""
        servers = self.servers if servers is None else servers
        sent: dict[str, list[Sent]] = {server.name: [] for server in servers}
        for number in range(self.options.num_rounds):
            first = self._num_turns % len(servers)
            self._num_turns += 1
            for server in [*servers[first:], *servers[:first]]:
                sent[server.name].append(self._turn(self.load, server, value, number))
        self.points += [self._point(server.name, value, sent[server.name]) for server in servers]

    def search(self, guess: float, tolerance: float, most: float = math.inf) -> None:
        """Measures points until each server's highest one that is kept is known within a factor of `tolerance`.

        A point that is new is measured on all servers that have kept every lower one. Below the guess nothing is
        measured on a server that misses the targets with one request at a time, and nothing that would take more than
        six times as long as the guess.
        """
        lowest = guess * _LOWEST
        num_least = lowest * self.load.arrivals_s(lowest)
        self.least = max(lowest, min(num_least / (_LONGER * self.load.arrivals_s(guess)), guess))
        for server in self.servers:
            highest_feasible(
                lambda value, server=server: self._kept(server, value, guess),  # type: ignore[misc]
                guess,
                tolerance,
                least=self.least,
                most=most,
            )

    def may_keep(self, server: str) -> bool:
        """Whether half of the share that is wanted was in time of requests sent one at a time, or none were sent so."""
        return server not in self.alone or self.alone[server].attainment >= _HALF * self.options.attainment

    def _kept(self, server: Gateway, value: float, guess: float) -> Point | None:
        if value < guess and self._found(server.name, value) is None:
            if server.name not in self.alone:
                sent = self._turn(self.load.alone(self.options.targets), server, _ONE_AT_A_TIME, 0)
                self.alone[server.name] = summarized(sent.outcomes, self.options.targets, sent.arrivals_s)
            if not self.may_keep(server.name):
                return None
        if self._found(server.name, value) is None:
            others = [one for one in self.servers if one is server or not self._failed_below(one.name, value)]
            self.measure(value, [one for one in others if self._found(one.name, value) is None])
        point = self._found(server.name, value)
        return point if point is not None and point.is_kept else None

    def _found(self, name: str, value: float) -> Point | None:
        return next((point for point in self.points if point.server == name and point.value == value), None)

    def _failed_below(self, name: str, value: float) -> bool:
        return any(point.server == name and not point.is_kept and point.value <= value for point in self.points)

    def _turn(self, load: BenchLoad, server: Gateway, value: float, number: int) -> Sent:
        point = value or 1.0
        num = load.num_requests(point)
        self.on_begin(server.name, value, num)
        if self._num_sent:
            time.sleep(_SETTLE_S)
        first = self.options.seed * _REQUESTS_APART + self._num_sent
        self._num_sent += num
        return asyncio.run(load.sent(server, point, self.options.seed + number * _SEEDS_APART, first))

    def _point(self, name: str, value: float, sent: Sequence[Sent]) -> Point:
        outcomes = [outcome for turn in sent for outcome in turn.outcomes]
        summary = summarized(outcomes, self.options.targets, sum(turn.arrivals_s for turn in sent))
        wall_s = sum(turn.wall_s for turn in sent)
        return Point(
            name,
            value,
            summary.attainment >= self.options.attainment,
            summary,
            summary.num_output_tokens / wall_s,
            3600 * sum(turn.num_jobs for turn in sent) / wall_s,
            3600 * sum(turn.num_jobs_in_time for turn in sent) / wall_s,
        )


def highest_kept(points: Sequence[Point], server: str) -> Point | None:
    """A server's highest point that was kept."""
    kept = [point for point in points if point.is_kept and point.server == server]
    return max(kept, key=lambda point: point.value, default=None)
