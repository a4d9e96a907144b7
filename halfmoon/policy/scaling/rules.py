"""The bounds within which the autopilot acts."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import Role


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Raises InvalidRequest for bounds that contradict each other."""

    attainment: float = 0.9  # share of requests that are to meet the targets
    pressed: float = 0.85  # pressure from which a phase is relieved; 1 while `attainment` is reached
    gain: float = 0.1  # least fall of the greater pressure that a change must promise
    settle_s: float = 20.0  # for as long a change is not taken back, unless the way to the target promises much more
    between_s: float = 1.0  # least time between two changes
    dwell_s: float = 30.0  # a worker keeps its role for as long
    person_s: float = 900.0  # what a person changed is left alone for as long
    confirm_s: float = 15.0  # a change that has no effect by then is given up
    changes_per_hour: int = 60  # for each worker: as many at once, which come back evenly
    roles: tuple[Role, ...] = ("prefill", "decode")  # between which workers change; others stay as they are
    min_workers: int = 0
    max_workers: int = 0  # 0: as many as there are; workers are neither started nor stopped
    idle: float = 0.6  # a worker is stopped if the pressure stays below this without it
    patience_s: float = 10.0  # for as long workers must be missed before one is started, or the targets given up
    start_s: float = 900.0  # a worker that was ordered and has not joined by then is given up
    idle_s: float = 300.0  # for as long a worker must be idle before it is stopped
    window_s: int = 8  # of traffic
    lead_s: float = 4.0  # running sequences are extrapolated as far
    clear_s: float = 4.0  # queues are to be gone in as long

    def __post_init__(self) -> None:
        _check(0 < self.attainment < 1, "attainment", "must be between 0 and 1")
        _check(self.idle < self.pressed, "idle", "must be less than pressed")
        _check(not self.max_workers or self.min_workers <= self.max_workers, "min_workers", "exceeds max_workers")
        _check(self.changes_per_hour >= 0, "changes_per_hour", "must not be negative")
        for name in ("window_s", "lead_s", "clear_s"):
            _check(getattr(self, name) > 0, name, "must be above 0")


def _check(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"the autopilot's {param} {problem}", param=param)
