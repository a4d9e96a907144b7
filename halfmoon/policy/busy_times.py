"""When each worker had work lately, by the requests that were sent to it: what its neighbours had to share with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_KEPT_S = 60.0  # of the past
_MAX_TIMES = 1_000  # of one worker


class BusyTimes:
    """Owns, for each worker, how many requests it has, since when it has any, and the times before when it had some.

    A request may begin and end more than once, and on a worker that left.
    """

    def __init__(self) -> None:
        self._present: dict[str, set[str]] = {}
        self._since_s: dict[str, float] = {}  # of those that are busy
        self._times: dict[str, deque[tuple[float, float]]] = {}

    def begin(self, worker_id: str, request_id: str, now_s: float) -> None:
        """The worker has work for this request."""
        present = self._present.setdefault(worker_id, set())
        if not present:
            self._since_s[worker_id] = now_s
        present.add(request_id)

    def end(self, worker_id: str, request_id: str, now_s: float) -> None:
        """It has none any more; nothing where it had none."""
        present = self._present.get(worker_id, set())
        if request_id not in present:
            return
        present.remove(request_id)
        if not present:
            times = self._times.setdefault(worker_id, deque(maxlen=_MAX_TIMES))
            times.append((self._since_s.pop(worker_id), now_s))
            while times[0][1] < now_s - _KEPT_S:
                times.popleft()

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        for known in (self._present, self._since_s, self._times):
            known.pop(worker_id, None)

    def is_busy(self, worker_id: str) -> bool:
        """Whether it has work now."""
        return worker_id in self._since_s

    def mean_busy(self, worker_ids: Iterable[str], begin_s: float, end_s: float) -> float:
        """How many of these workers had work, on average over that time."""
        if end_s <= begin_s:
            return 0.0
        busy_s = sum(self._busy_s(worker_id, begin_s, end_s) for worker_id in worker_ids)
        return busy_s / (end_s - begin_s)

    def _busy_s(self, worker_id: str, begin_s: float, end_s: float) -> float:
        busy_s = max(end_s - max(self._since_s.get(worker_id, end_s), begin_s), 0.0)
        for began_s, ended_s in reversed(self._times.get(worker_id, ())):
            if ended_s <= begin_s:
                break
            busy_s += max(min(ended_s, end_s) - max(began_s, begin_s), 0.0)
        return busy_s
