"""Chooses a worker's latency model: its own, or that of its kind while it has too few recent measurements.

Otherwise a worker whose first prompt happened to be slow would look slow forever: it would never be chosen again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

_MIN_MEASUREMENTS = 8
_STALE_S = 60.0  # a worker without measurements for this long may be as fast as its kind again

Model = TypeVar("Model")


class ModelFallback(Generic[Model]):
    """Owns the newest settled model of each kind of worker, such as a role on a device, and each worker's number of
    measurements.

    As long as no worker of a kind is settled, an unsettled model serves all of them: a worker without one would look
    infinitely fast. Knows nothing of what a model is.
    """

    def __init__(self) -> None:
        self._newest: dict[str, Model] = {}
        self._unsettled: dict[str, Model] = {}
        self._num_measured: dict[str, int] = {}
        self._measured_s: dict[str, float] = {}

    def note(self, worker_id: str, kind: str, model: Model, num_new: int, now_s: float) -> None:
        """Takes a worker's model after `num_new` more measurements."""
        self._num_measured[worker_id] = self._num_measured.get(worker_id, 0) + num_new
        self._measured_s[worker_id] = now_s
        models = self._newest if self._num_measured[worker_id] >= _MIN_MEASUREMENTS else self._unsettled
        models[kind] = model

    def forget(self, worker_id: str) -> None:
        """Forgets a worker that left. The model of its kind stays."""
        self._num_measured.pop(worker_id, None)
        self._measured_s.pop(worker_id, None)

    def model_for(self, worker_id: str, kind: str, own: Model, now_s: float, like: Sequence[str] = ()) -> Model:
        """The worker's own model if it has enough recent measurements; else its kind's, if there is one.

        Else that of the first of the kinds `like` it.
        """
        is_known = self._num_measured.get(worker_id, 0) >= _MIN_MEASUREMENTS
        if is_known and now_s - self._measured_s[worker_id] <= _STALE_S:
            return own
        known = (models[each] for models in (self._newest, self._unsettled) for each in (kind, *like) if each in models)
        return next(known, own)
