"""Settings of the planner."""

from __future__ import annotations

from pydantic import Field

from halfmoon.config.section import Section
from halfmoon.host_limits import num_cores


class PlannerConfig(Section):
    """Limits on concurrent searches."""

    max_running: int = Field(1, ge=1, description="searches that run at once")
    max_waiting: int = Field(4, ge=0, description="searches that wait for their turn; more are refused")
    deadline_s: float = Field(900.0, gt=0, description="total time of one search")
    processes: int = Field(
        default_factory=num_cores, ge=1, description="processes of one search; default: one per core"
    )
