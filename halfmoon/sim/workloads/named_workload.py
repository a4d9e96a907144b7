"""A workload by what a user writes: a trace's path, or the name of length distributions that are drawn from."""

from __future__ import annotations

from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.arrival_processes import ArrivalProcess
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

DRAWN_REQUESTS = 1000  # where nobody says how many
_LONGEST_S = 1e11  # of a workload: later times are too coarse to tell microseconds


def is_trace(text: str) -> bool:
    """Whether it is the path of a file of requests."""
    return Path(text).is_file() or Path(text).suffix in (".json", ".jsonl", ".csv")


def asked_workload(
    text: str, rate_per_s: float | None, num: int | None, process: ArrivalProcess, cv: float, seed: int
) -> Workload:
    """A trace's requests, or drawn ones. Raises InvalidRequest saying what is missing or makes no sense."""
    found = _asked(text, rate_per_s, num, process, cv, seed)
    if found.duration_s > _LONGEST_S:
        raise InvalidRequest(
            f"the requests come within {found.duration_s:.3g} s, and {_LONGEST_S:g} are the most: give a higher rate",
            param="rate",
        )
    return found


def _asked(
    text: str, rate_per_s: float | None, num: int | None, process: ArrivalProcess, cv: float, seed: int
) -> Workload:
    if is_trace(text):
        found = read_workload(Path(text))
        found = found if num is None else found.first(num)
        return found if rate_per_s is None else found.at_rate(rate_per_s)
    lengths = named_lengths(text)
    if rate_per_s is None:
        raise InvalidRequest(f"workload {text} needs --rate, the requests that arrive a second", param="rate")
    return synthetic_workload(lengths, num or DRAWN_REQUESTS, rate_per_s, seed=seed, process=process, cv=cv)
