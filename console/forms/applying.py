"""Applying a plan, as the console follows it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from console.planner_api import PlannerError
from halfmoon.pb import planner_pb2


@dataclass(slots=True)
class ApplyState:
    """State of the change. Written by its thread alone; each assignment is complete."""

    progress: planner_pb2.Progress | None = None
    applied: planner_pb2.WorkerChange | None = None
    problem: str | None = None
    is_over: bool = False


class Applying:
    """Follows one change of the workers, which continues even if the page is closed."""

    def __init__(self, updates: Iterable[planner_pb2.ApplyUpdate]) -> None:
        self.state = ApplyState()
        threading.Thread(target=_follow, args=(updates, self.state), daemon=True).start()


def _follow(updates: Iterable[planner_pb2.ApplyUpdate], state: ApplyState) -> None:
    try:
        for update in updates:
            if update.HasField("progress"):
                state.progress = update.progress
            else:
                state.applied = update.applied
    except PlannerError as error:
        state.problem = str(error)
    finally:
        state.is_over = True
