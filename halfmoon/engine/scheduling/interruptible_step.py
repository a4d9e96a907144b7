"""A step that can be interrupted: between two of its layers commands run, and nested steps. No torch, no asyncio."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_int

from halfmoon.engine.scheduling.schedule import Schedule


class StepRuns(Exception):
    """A request is in a step that is interrupted, and its blocks are being written: it ends after the step."""


class InterruptibleStep:
    """Owns how far a step has come, and how long it was interrupted. A `Gate` of its layers; engine thread only."""

    def __init__(self, schedule: Schedule, num_layers: int, between_layers: Callable[[], None], asked: c_int) -> None:
        """`between_layers` is called before a layer attends while `asked` is not 0, which it becomes then."""
        self.schedule = schedule
        self.asked = asked
        self.interrupted_s = 0.0
        self.error: Exception | None = None
        self.num_nested = 0  # see `OuterStep`
        self._num_layers = num_layers
        self._between_layers = between_layers
        self._layer = 0

    @property
    def left(self) -> float:
        """The share of the layers that are still to be computed."""
        return 1 - self._layer / self._num_layers

    def check_absent(self, request_id: str) -> None:
        """Raises StepRuns for a request of the step."""
        if any(item.sequence.request_id == request_id for item in self.schedule.scheduled):
            raise StepRuns

    def wait(self, layer: int) -> None:
        """See `Gate.wait`. An error of what runs meanwhile is `error`, too: it is not one of the step."""
        began_s = time.perf_counter()
        self._layer = layer
        self.asked.value = 0  # first: whoever asks from now on is heard
        try:
            self._between_layers()
        except Exception as error:
            self.error = error
            raise
        finally:
            self.interrupted_s += time.perf_counter() - began_s
