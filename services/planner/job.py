"""Jobs: what a separate process computes, and its messages. Plain values, one JSON object a line.

The process gets one line, `{"kind": ..., "request": {...}, ...}`. It sends any number of `{"progress": [what, done,
total]}`, then one `{"result": {...}}` or `{"error": {"message": ..., "param": ...}}`. The end of its stdin ends it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from halfmoon.plan.request import PlanRequest
from halfmoon.sim.simulate_point import PointRequest


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A search for a plan."""

    request: PlanRequest
    num_processes: int
    with_curves: bool
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, slots=True)
class PointJob:
    """A simulation of one cluster."""

    request: PointRequest
    with_requests: bool
    kind: Literal["point"] = "point"


Job: TypeAlias = PlanJob | PointJob


@dataclass(frozen=True, slots=True)
class JobProgress:
    """`done` of `total` steps of the stage `what` are done."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a successful job."""

    result: dict[str, Any]


def job_line(job: Job) -> dict[str, Any]:
    """Converts a job to the process's input."""
    return asdict(job)


def job_from(line: dict[str, Any]) -> Job:
    """Parses the output of `job_line`."""
    if line["kind"] == "plan":
        return PlanJob(PlanRequest(**line["request"]), line["num_processes"], line["with_curves"])
    return PointJob(PointRequest(**line["request"]), line["with_requests"])
