"""Conversations and jobs of agents: turns that follow one another, each with all turns before it in its prompt.

A trace of sessions has rows in aiperf's form: `session_id`, `input_length` (the turn's own tokens, without the history)
and `output_length`; the first row of a session may have `timestamp`, the others `delay` (both in milliseconds), the
pause between the answer before and this turn: a person who reads, or an agent's tool that runs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.drawn_workload import MOST_TOKENS, arrivals
from halfmoon.sim.workloads.lengths import Lengths
from halfmoon.sim.workloads.traces import row_length, row_time, trace_rows

_FORM = "rows of sessions have session_id, input_length, output_length, and timestamp or delay (ms)"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt_tokens: int  # of this turn alone
    output_tokens: int
    delay_s: float = 0.0  # from the end of the answer before


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, or a job of an agent."""

    start_s: float
    turns: tuple[Turn, ...]


def drawn_sessions(
    lengths: Lengths, num_sessions: int, num_turns: int, delay_s: float, rate_per_s: float, seed: int
) -> list[Session]:
    """Sessions that begin as a Poisson process; the lengths are those of each turn."""
    arrival_rng, prompt_rng, output_rng = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(3))
    starts_s = arrivals("poisson", num_sessions, rate_per_s, arrival_rng)
    shape = (num_sessions, num_turns)
    prompts = lengths.prompt.sample(num_sessions * num_turns, prompt_rng, MOST_TOKENS).reshape(shape)
    outputs = lengths.output.sample(num_sessions * num_turns, output_rng, MOST_TOKENS).reshape(shape)
    return [
        Session(
            float(start_s),
            tuple(Turn(int(ins[turn]), int(outs[turn]), delay_s if turn else 0.0) for turn in range(num_turns)),
        )
        for start_s, ins, outs in zip(starts_s, prompts, outputs, strict=True)
    ]


def has_sessions(path: Path) -> bool:
    """Whether the first row of a trace names a session. Raises InvalidRequest for a file that cannot be read."""
    first = trace_rows(path)[0]
    return isinstance(first, Mapping) and "session_id" in first


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a trace in the order of their beginnings. Raises InvalidRequest, which names the wrong row."""
    starts_s: dict[Any, float] = {}
    turns: dict[Any, list[Turn]] = {}
    for number, row in enumerate(trace_rows(path)):
        try:
            key, turn = row["session_id"], _turn(row)
            starts_s.setdefault(key, row_time(row, "timestamp") / 1000 if "timestamp" in row else 0.0)
            turns.setdefault(key, []).append(turn)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidRequest(f"row {number} of {path} is wrong ({missing}); {_FORM}", param="trace") from error
    first_s = min(starts_s.values())
    sessions = [Session(starts_s[key] - first_s, tuple(rows)) for key, rows in turns.items()]
    return sorted(sessions, key=lambda session: session.start_s)


def at_rate(sessions: Sequence[Session], rate_per_s: float) -> list[Session]:
    """The same sessions at another mean rate. Raises InvalidRequest if they all begin at once."""
    span_s = sessions[-1].start_s
    if span_s <= 0:
        raise InvalidRequest("the trace's sessions have no different timestamps: give --concurrency, not --rates")
    factor = (len(sessions) - 1) / span_s / rate_per_s
    return [Session(session.start_s * factor, session.turns) for session in sessions]


def _turn(row: Mapping[str, Any]) -> Turn:
    delay_s = row_time(row, "delay") / 1000 if row.get("delay") is not None else 0.0
    if delay_s < 0:
        raise ValueError(f"delay is {row['delay']!r}, and must not be negative")
    return Turn(row_length(row, "input_length", 1), max(row_length(row, "output_length", 0), 1), delay_s)
