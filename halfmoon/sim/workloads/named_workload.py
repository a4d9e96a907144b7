"""A workload by its text: the path of a trace, or the name of length distributions to draw from."""

from __future__ import annotations

import os
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.drawn_workload import ArrivalProcess, synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload, check_duration

DRAWN_REQUESTS = 1000  # by default


def is_trace(text: str) -> bool:
    """Whether the text is the path of a file of requests."""
    return os.path.isfile(text) or Path(text).suffix in (".json", ".jsonl", ".csv")


def named_workload(
    text: str, rate_per_s: float | None, num: int | None, process: ArrivalProcess, cv: float, seed: int
) -> Workload:
    """Reads a trace or draws requests. Raises InvalidRequest, which says what is missing or invalid."""
    workload = _asked(text, rate_per_s, num, process, cv, seed)
    check_duration(workload.duration_s, "give a higher rate", "rate")
    return workload


def _asked(
    text: str, rate_per_s: float | None, num: int | None, process: ArrivalProcess, cv: float, seed: int
) -> Workload:
    if is_trace(text):
        workload = read_workload(Path(text))
        workload = workload if num is None else workload.first(num)
        return workload if rate_per_s is None else workload.at_rate(rate_per_s)
    lengths = named_lengths(text)
    if rate_per_s is None:
        raise InvalidRequest(f"workload {text} needs --rate, the requests that arrive a second", param="rate")
    return synthetic_workload(lengths, num or DRAWN_REQUESTS, rate_per_s, seed=seed, process=process, cv=cv)
