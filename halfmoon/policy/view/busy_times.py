"""When workers had work lately, by the requests that were sent there: what their neighbours had to share with them."""

from __future__ import annotations

import math
from bisect import bisect_right

_KEPT_S = 60.0  # of the past
_LEAST_PAST_S = 10.0  # of it tells what is usual


class BusyTimes:
    """Owns, for each member, which requests it has, and for each host how many of its workers were busy at any time of
    the last minute. Who asks about one worker's neighbours asks about their sum.

    A request may begin and end more than once, and on a worker that left.
    """

    def __init__(self) -> None:
        self._present: dict[str, set[str]] = {}
        self._own: dict[str, _Past] = {}
        self._of_host: dict[str, _Past] = {}
        self._hosts: dict[str, str] = {}  # by worker

    def join(self, worker_id: str, host: str) -> None:
        """A member, which runs there."""
        self._hosts[worker_id] = host
        self._own[worker_id] = _Past()
        self._of_host.setdefault(host, _Past())

    def begin(self, worker_id: str, request_id: str, now_s: float) -> None:
        """The worker has work for this request; nothing for one that is no member."""
        if worker_id not in self._own:
            return
        present = self._present.setdefault(worker_id, set())
        if not present:
            self._change(worker_id, 1, now_s)
        present.add(request_id)

    def end(self, worker_id: str, request_id: str, now_s: float) -> None:
        """It has none any more; nothing where it had none."""
        present = self._present.get(worker_id, set())
        if request_id not in present:
            return
        present.remove(request_id)
        if not present:
            self._change(worker_id, -1, now_s)

    def forget(self, worker_id: str) -> None:
        """The worker is gone; that its neighbours had it beside them stays true."""
        self._present.pop(worker_id, None)
        own, host = self._own.pop(worker_id, None), self._hosts.pop(worker_id, None)
        if own is None or host is None:
            return
        if host not in self._hosts.values():
            del self._of_host[host]
        elif own.num_busy:
            self._of_host[host].change(-1, self._of_host[host].changed_s)

    def is_busy(self, worker_id: str) -> bool:
        """Whether it has work now."""
        return bool(self._present.get(worker_id))

    def mean_busy_beside(self, worker_id: str, begin_s: float, end_s: float) -> float:
        """How many other workers on the host of a member had work, on average over that time."""
        if end_s <= begin_s:
            return 0.0
        own, host = self._own[worker_id], self._of_host[self._hosts[worker_id]]
        busy_s = host.busy_s(begin_s, end_s) - own.busy_s(begin_s, end_s)
        return max(busy_s, 0.0) / (end_s - begin_s)

    def usual_beside(self, worker_id: str, now_s: float) -> float:
        """The same over the last minute, or since the first of them was busy. 0 while little is known."""
        begin_s = max(self._of_host[self._hosts[worker_id]].first_s, now_s - _KEPT_S)
        return self.mean_busy_beside(worker_id, begin_s, now_s) if now_s - begin_s >= _LEAST_PAST_S else 0.0

    def _change(self, worker_id: str, by: int, now_s: float) -> None:
        self._own[worker_id].change(by, now_s)
        self._of_host[self._hosts[worker_id]].change(by, now_s)


class _Past:
    """Owns how many were busy at each moment since a minute ago at least, and its sum over time."""

    def __init__(self) -> None:
        self._times_s: list[float] = []  # of changes
        self._nums: list[int] = []  # busy since then
        self._sums_s: list[float] = []  # of busy seconds until then

    @property
    def num_busy(self) -> int:
        """Now."""
        return self._nums[-1] if self._nums else 0

    @property
    def first_s(self) -> float:
        """The first change that is known; never, before it."""
        return self._times_s[0] if self._times_s else math.inf

    @property
    def changed_s(self) -> float:
        """When it did the last time; there must have been one."""
        return self._times_s[-1]

    def change(self, by: int, now_s: float) -> None:
        """So many more from now on."""
        now_s = max(now_s, self._times_s[-1]) if self._times_s else now_s
        num_busy, sum_s = self.num_busy + by, self._until(now_s)
        self._times_s.append(now_s)
        self._nums.append(num_busy)
        self._sums_s.append(sum_s)
        if self._times_s[0] < now_s - 2 * _KEPT_S:
            self._forget(now_s - _KEPT_S)

    def busy_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of all of them between the two; what is still going on goes on."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, at_s: float) -> float:
        last = bisect_right(self._times_s, at_s) - 1
        return self._sums_s[last] + self._nums[last] * (at_s - self._times_s[last]) if last >= 0 else 0.0

    def _forget(self, before_s: float) -> None:
        """All but the last change before that: once a minute."""
        first = max(bisect_right(self._times_s, before_s) - 1, 0)
        del self._times_s[:first], self._nums[:first], self._sums_s[:first]
