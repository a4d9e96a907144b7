"""A job: what a process of its own computes, and what it says meanwhile. Plain values, one JSON object a line.

The process gets one line, `{"kind": ..., "request": {...}, ...}`, and says any number of `{"progress": [what, done,
total]}` and then one `{"result": {...}}` or `{"error": {"message": ..., "param": ...}}`. The end of its stdin ends it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from halfmoon.plan.request import PlanRequest
from halfmoon.sim.point import PointRequest


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A search."""

    request: PlanRequest
    num_processes: int
    with_curves: bool
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, slots=True)
class PointJob:
    """A simulation."""

    request: PointRequest
    with_requests: bool
    kind: Literal["point"] = "point"


Job: TypeAlias = PlanJob | PointJob


@dataclass(frozen=True, slots=True)
class JobProgress:
    """So much of so much is done."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job that went well."""

    found: dict[str, Any]


def job_line(job: Job) -> dict[str, Any]:
    """What the process is told."""
    return asdict(job)


def job_from(line: dict[str, Any]) -> Job:
    """What `job_line` made."""
    if line["kind"] == "plan":
        return PlanJob(PlanRequest(**line["request"]), line["num_processes"], line["with_curves"])
    return PointJob(PointRequest(**line["request"]), line["with_requests"])
