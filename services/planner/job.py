"""A planner job and its updates, as plain values.

A search runs in a process of its own, which exchanges one JSON object a line with the planner. It reads one line: the
fields of `PlanJob`. It writes any number of `{"progress": [what, done, total]}`, then one `{"result": {...}}` or
`{"error": {"message": ..., "param": ...}}`. The process ends when its stdin is closed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halfmoon.plan.request import PlanRequest


@dataclass(frozen=True, slots=True)
class PlanJob:
    """One search for a plan, or for a map over targets."""

    request: PlanRequest
    num_processes: int
    with_curves: bool
    is_map: bool = False


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How much of a stage is done."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """The last update of a job that succeeded."""

    result: dict[str, Any]


def job_line(job: PlanJob) -> dict[str, Any]:
    """Converts a job to the line that its process reads."""
    return asdict(job)


def job_from(line: dict[str, Any]) -> PlanJob:
    """Converts the line back to the job."""
    return PlanJob(PlanRequest(**line["request"]), line["num_processes"], line["with_curves"], line["is_map"])
