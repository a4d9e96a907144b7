"""A step that can be interrupted: between two of its layers commands run, and nested steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_int

from halfmoon.engine.engine_core import EngineCore, Step


class RunningStep:
    """Owns how far a step has come, and how long it was interrupted. A `Gate` of its layers; engine thread only."""

    def __init__(self, step: Step, core: EngineCore, between_layers: Callable[[], None], asked: c_int) -> None:
        """`between_layers` is called before a layer attends while `asked` is not 0."""
        self.step = step
        self.asked = asked
        self.interrupted_s = 0.0
        self.error: Exception | None = None
        self.num_nested = 0  # see `OuterStep`
        self._core = core
        self._between_layers = between_layers
        self._request_ids = frozenset(item.sequence.request_id for item in step.schedule.scheduled)
        self._layer = 0

    @property
    def left(self) -> float:
        """The share of the layers that are still to be computed."""
        return 1 - self._layer / self._core.layout.num_layers

    def wait(self, layer: int) -> None:
        """See `Gate.wait`. An error of what runs meanwhile is `error`, too: it is not one of the step."""
        began_s = time.perf_counter()
        self._layer, self._core.interrupted = layer, self._request_ids
        try:
            self._between_layers()
        except Exception as error:
            self.error = error
            raise
        finally:
            self._core.interrupted = frozenset()
            self.interrupted_s += time.perf_counter() - began_s
