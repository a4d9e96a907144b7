"""Settings of the planner."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from halfmoon.config.section import Section, off_is_a_word
from halfmoon.host_limits import num_cores
from halfmoon.policy.scaling.rules import ScalingRules

AutopilotMode: TypeAlias = Literal["off", "observe", "act"]


class AutopilotConfig(Section):
    """What the autopilot may do."""

    autopilot: Annotated[AutopilotMode, BeforeValidator(off_is_a_word)] = Field(
        "observe",
        description="whether workers' roles follow the traffic; observe only says what it would do; operators may set "
        "another mode while it runs",
    )
    autopilot_dwell_s: float = Field(30.0, ge=0, description="the autopilot leaves a worker in its role for as long")
    autopilot_person_s: float = Field(
        900.0, ge=0, description="the autopilot leaves a worker alone for as long after a person has changed its role"
    )
    autopilot_changes_per_hour: int = Field(
        60,
        ge=0,
        description="changes of the autopilot for each worker: as many at once at most, which come back evenly within "
        "an hour",
    )

    autopilot_min_workers: int = Field(1, ge=0, description="the autopilot stops no worker if no more are there")
    autopilot_max_workers: int = Field(
        0,
        ge=0,
        description="up to how many workers the autopilot starts on this system; 0: it starts and stops none",
    )
    autopilot_idle_s: float = Field(
        300.0, ge=0, description="a worker that the phases do not need is stopped after as long"
    )

    def scaling_rules(self) -> ScalingRules:
        """The autopilot's bounds."""
        return ScalingRules(
            dwell_s=self.autopilot_dwell_s,
            person_s=self.autopilot_person_s,
            changes_per_hour=self.autopilot_changes_per_hour,
            min_workers=self.autopilot_min_workers,
            max_workers=self.autopilot_max_workers,
            idle_s=self.autopilot_idle_s,
        )


class PlannerConfig(AutopilotConfig):
    """Limits on concurrent searches."""

    max_running: int = Field(1, ge=1, description="searches that run at once")
    max_waiting: int = Field(4, ge=0, description="searches that wait for their turn; more are refused")
    deadline_s: float = Field(900.0, gt=0, description="total time of one search")
    processes: int = Field(
        default_factory=num_cores, ge=1, description="processes of one search; default: one per core"
    )
