"""When workers were busy recently, by the requests sent to them: the cause of interference on a host."""

from __future__ import annotations

import math
from bisect import bisect_right

_KEPT_S = 60.0  # of history
_LEAST_PAST_S = 10.0  # of history before a usual number is given


class BusyTimes:
    """Owns the requests of each member, and how many workers of each host were busy at any time in the last minute.

    Colocated workers are only known as a sum. A request may begin and end more than once, and on a worker that left.
    """

    def __init__(self) -> None:
        self._present: dict[str, set[str]] = {}
        self._own: dict[str, _Past] = {}
        self._of_host: dict[str, _Past] = {}
        self._hosts: dict[str, str] = {}  # by worker

    def join(self, worker_id: str, host: str) -> None:
        """Adds a member that runs on `host`."""
        self._hosts[worker_id] = host
        self._own[worker_id] = _Past()
        self._of_host.setdefault(host, _Past())

    def begin(self, worker_id: str, request_id: str, now_s: float) -> None:
        """Marks a member busy with a request; ignores workers that are not members."""
        if worker_id not in self._own:
            return
        present = self._present.setdefault(worker_id, set())
        if not present:
            self._change(worker_id, 1, now_s)
        present.add(request_id)

    def end(self, worker_id: str, request_id: str, now_s: float) -> None:
        """Ends the work of a member for a request, if there is any."""
        present = self._present.get(worker_id, set())
        if request_id not in present:
            return
        present.remove(request_id)
        if not present:
            self._change(worker_id, -1, now_s)

    def forget(self, worker_id: str) -> None:
        """Removes a member. Its past busy time still counts for the other workers of its host."""
        self._present.pop(worker_id, None)
        own, host = self._own.pop(worker_id, None), self._hosts.pop(worker_id, None)
        if own is None or host is None:
            return
        if host not in self._hosts.values():
            del self._of_host[host]
        elif own.num_busy:
            self._of_host[host].change(-1, self._of_host[host].changed_s)

    def mean_busy_colocated(self, worker_id: str, begin_s: float, end_s: float) -> float:
        """Mean number of busy workers on the host of a member, without itself, over a period."""
        if end_s <= begin_s:
            return 0.0
        own, host = self._own[worker_id], self._of_host[self._hosts[worker_id]]
        busy_s = host.busy_s(begin_s, end_s) - own.busy_s(begin_s, end_s)
        return max(busy_s, 0.0) / (end_s - begin_s)

    def usual_colocated(self, worker_id: str, now_s: float) -> float:
        """The same over the last minute, or since a worker of the host was first busy; 0 while little is known."""
        begin_s = max(self._of_host[self._hosts[worker_id]].first_s, now_s - _KEPT_S)
        return self.mean_busy_colocated(worker_id, begin_s, now_s) if now_s - begin_s >= _LEAST_PAST_S else 0.0

    def _change(self, worker_id: str, by: int, now_s: float) -> None:
        self._own[worker_id].change(by, now_s)
        self._of_host[self._hosts[worker_id]].change(by, now_s)


class _Past:
    """Owns the number of busy workers at each moment of at least the last minute, and its integral."""

    def __init__(self) -> None:
        self._times_s: list[float] = []  # times of changes
        self._nums: list[int] = []  # busy from each change on
        self._sums_s: list[float] = []  # busy seconds until each change

    @property
    def num_busy(self) -> int:
        """The present number."""
        return self._nums[-1] if self._nums else 0

    @property
    def first_s(self) -> float:
        """The first change that is known; inf if there is none."""
        return self._times_s[0] if self._times_s else math.inf

    @property
    def changed_s(self) -> float:
        """The latest change. There must be one."""
        return self._times_s[-1]

    def change(self, by: int, now_s: float) -> None:
        """Changes the number by `by` from now on."""
        now_s = max(now_s, self._times_s[-1]) if self._times_s else now_s
        num_busy, sum_s = self.num_busy + by, self._until(now_s)
        self._times_s.append(now_s)
        self._nums.append(num_busy)
        self._sums_s.append(sum_s)
        if self._times_s[0] < now_s - 2 * _KEPT_S:
            self._forget(now_s - _KEPT_S)

    def busy_s(self, begin_s: float, end_s: float) -> float:
        """Busy seconds of all workers in a period; the present number is assumed to last."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, at_s: float) -> float:
        last = bisect_right(self._times_s, at_s) - 1
        return self._sums_s[last] + self._nums[last] * (at_s - self._times_s[last]) if last >= 0 else 0.0

    def _forget(self, before_s: float) -> None:
        """Drops all but the last change before `before_s`: once a minute."""
        first = max(bisect_right(self._times_s, before_s) - 1, 0)
        del self._times_s[:first], self._nums[:first], self._sums_s[:first]
