"""Load reports from workers to the gateway: at full intervals, from workers whose load has changed."""

from __future__ import annotations

from typing import Protocol

from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.worker.worker import SimWorker


class ReportReader(Protocol):
    """Reads load reports: the router."""

    def report(self, worker: SimWorker, now_s: float) -> None:
        """Takes note of the worker's load and of the changes in its prefix cache."""


class LoadReports:
    """Owns the workers that have changed since the last report, and whether the next report is scheduled."""

    def __init__(self, events: EventQueue, report_s: float, reader: ReportReader | None) -> None:
        """One report every `report_s`; no reports without a reader."""
        self._events = events
        self._report_s = report_s
        self._reader = reader
        self._changed: dict[int, SimWorker] = {}
        self._has_tick = False

    def note(self, worker: SimWorker) -> None:
        """Marks a worker whose next load report has news."""
        if self._reader is None:
            return
        self._changed[worker.number] = worker
        if not self._has_tick:
            self._has_tick = True
            self._events.at(_next_multiple(self._report_s, self._events.now_s), self._on_tick, self._reader)

    def _on_tick(self, reader: ReportReader) -> None:
        self._has_tick = False
        changed, self._changed = self._changed, {}
        for worker in changed.values():
            if worker.is_alive:
                reader.report(worker, self._events.now_s)
                if worker.steps.wake_s is not None:
                    self.note(worker)


def _next_multiple(interval_s: float, now_s: float) -> float:
    """The first multiple of the interval after now. Rounding makes 1.0 // 0.1 nine, and ten tenths would be now
    again.
    """
    number = now_s // interval_s + 1
    following_s = number * interval_s
    return following_s if following_s > now_s else (number + 1) * interval_s
