"""What `halfmoon bench` sends at one point of a sweep, and what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from halfmoon.errors import InvalidRequest
from halfmoon.replay.client import Gateway
from halfmoon.replay.outcome import Outcome, ReplayTargets
from halfmoon.replay.player import played, played_sessions
from halfmoon.replay.sessions import Session, at_rate, drawn_sessions, has_sessions, read_sessions
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import Lengths
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

_LEAST_REQUESTS = 20  # at each rate, so that a share of nine tenths means something
_LEAST_ROUNDS = 4  # sessions one after the other, of each that runs at once
NUM_ALONE = 5
"""Requests that are sent one at a time to see whether a server ever meets the targets."""

Pace = Literal["rate", "at once"]
"""Points of a sweep are arrivals per second (an open loop), or a number of sessions at once (a closed one)."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One server's turn at one point."""

    outcomes: Sequence[Outcome]
    arrivals_s: float  # in which requests began
    wall_s: float  # until the last one ended
    num_jobs: int = 0  # sessions of which all turns were answered; 0 where there are no sessions
    num_jobs_in_time: int = 0  # and all within the targets


class BenchLoad(Protocol):
    """A load that can be sent at any point of a sweep."""

    async def sent(self, server: Gateway, value: float, seed: int, first_request: int) -> Sent:
        """Sends everything and waits for all answers. Other values of `first_request` share no text."""

    def num_requests(self, value: float) -> int:
        """How many requests a point has."""

    def arrivals_s(self, rate: float) -> float:
        """In how many seconds the requests or sessions of a rate begin."""
        ...

    def alone(self, targets: ReplayTargets) -> BenchLoad:
        """A few such requests one at a time, at the point 1."""
        ...


@dataclass(frozen=True, slots=True)
class LoadAmount:
    """How much is sent at each point."""

    seconds: float  # of arrivals
    num: int | None = None  # requests or sessions; None: as many as arrive, at least twenty requests


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Single requests in an open loop: drawn ones, or those of a trace at another rate."""

    source: Lengths | Workload
    amount: LoadAmount

    async def sent(self, server: Gateway, value: float, seed: int, first_request: int) -> Sent:
        """See BenchLoad."""
        workload = self._workload(value, seed)
        began_s = time.monotonic()
        outcomes = await played(workload, server, lambda: None, first_request)
        arrivals_s = max(workload.duration_s, len(workload) / value)
        return Sent(outcomes, arrivals_s, time.monotonic() - began_s)

    def num_requests(self, value: float) -> int:
        """See BenchLoad."""
        if isinstance(self.source, Workload):
            return len(self.source)
        return self.amount.num or max(math.ceil(value * self.amount.seconds), _LEAST_REQUESTS)

    def arrivals_s(self, rate: float) -> float:
        """See BenchLoad."""
        return self.num_requests(rate) / rate

    def alone(self, targets: ReplayTargets) -> BenchLoad:
        """See BenchLoad."""
        assert not isinstance(self.source, Workload), "a trace is not searched"
        turns, amount = DrawnTurns(self.source, 1, 0.0), LoadAmount(self.amount.seconds, NUM_ALONE)
        return SessionLoad(turns, amount, "at once", targets)

    def _workload(self, value: float, seed: int) -> Workload:
        if isinstance(self.source, Workload):
            return self.source.at_rate(value)
        return synthetic_workload(self.source, self.num_requests(value), value, seed=seed)


@dataclass(frozen=True, slots=True)
class DrawnTurns:
    """Sessions of equally many turns."""

    lengths: Lengths  # of each turn
    num_turns: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Conversations or jobs of agents, in either loop."""

    source: DrawnTurns | Sequence[Session]
    amount: LoadAmount
    pace: Pace
    targets: ReplayTargets

    async def sent(self, server: Gateway, value: float, seed: int, first_request: int) -> Sent:
        """See BenchLoad."""
        sessions = self._sessions(value, seed)
        at_once = None if self.pace == "rate" else round(value)
        began_s = time.monotonic()
        by_session = await played_sessions(sessions, server, first_request, at_once)
        wall_s = time.monotonic() - began_s
        done = [
            turns
            for session, turns in zip(sessions, by_session, strict=True)
            if len(turns) == len(session.turns) and turns[-1].end == "answered"
        ]
        return Sent(
            [outcome for turns in by_session for outcome in turns],
            wall_s,
            wall_s,
            len(done),
            sum(all(turn.meets(self.targets) for turn in turns) for turns in done),
        )

    def num_requests(self, value: float) -> int:
        """See BenchLoad."""
        if isinstance(self.source, DrawnTurns):
            return self._num_drawn(self.source, value) * self.source.num_turns
        return sum(len(session.turns) for session in self.source)

    def arrivals_s(self, rate: float) -> float:
        """See BenchLoad."""
        return (self._num_drawn(self.source, rate) if isinstance(self.source, DrawnTurns) else len(self.source)) / rate

    def alone(self, targets: ReplayTargets) -> BenchLoad:
        """See BenchLoad."""
        assert isinstance(self.source, DrawnTurns), "a trace is not searched"
        num = math.ceil(NUM_ALONE / self.source.num_turns)
        return replace(self, amount=LoadAmount(self.amount.seconds, num), pace="at once", targets=targets)

    def _num_drawn(self, source: DrawnTurns, value: float) -> int:
        if self.amount.num:
            return self.amount.num
        least = math.ceil(_LEAST_REQUESTS / source.num_turns)
        more = value * (self.amount.seconds if self.pace == "rate" else _LEAST_ROUNDS)
        return max(math.ceil(more), least)

    def _sessions(self, value: float, seed: int) -> Sequence[Session]:
        source = self.source
        if isinstance(source, DrawnTurns):
            num, rate = self._num_drawn(source, value), value if self.pace == "rate" else 1.0
            return drawn_sessions(source.lengths, num, source.num_turns, source.delay_s, rate, seed)
        return at_rate(source, value) if self.pace == "rate" else source


def trace_load(path: Path, amount: LoadAmount, pace: Pace, targets: ReplayTargets) -> tuple[BenchLoad, float]:
    """The load of a trace, and its own rate per second; 0 for a trace without different times.

    Raises InvalidRequest for a file that is no trace, and for a closed loop of requests without sessions.
    """
    if has_sessions(path):
        sessions = read_sessions(path)[: amount.num]
        span_s = sessions[-1].start_s
        return SessionLoad(sessions, amount, pace, targets), (len(sessions) - 1) / span_s if span_s else 0.0
    if pace == "at once":
        raise InvalidRequest(f"{path} has no session_id: its requests have times, so give --rates, not --concurrency")
    workload = read_workload(path)
    workload = workload if amount.num is None else workload.first(amount.num)
    return RequestLoad(workload, replace(amount, num=None)), workload.rate_per_s
