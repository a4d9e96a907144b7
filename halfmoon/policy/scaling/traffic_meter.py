"""Counts what comes to a gateway and what ends, for the autopilot. Time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from halfmoon.policy.scaling.observation import Traffic

_KEPT_S = 300.0


@dataclass(slots=True)
class _Second:
    """The counts of one second."""

    number: int
    num_requests: int = 0
    work_s: float = 0.0
    num_refused: int = 0
    num_ended: int = 0
    num_in_ttft: int = 0
    num_in_tpot: int = 0


class TrafficMeter:
    """Owns the counts of the last minutes, by second. Knows no classes."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()

    def came(self, work_s: float, now_s: float) -> None:
        """Counts a request whose prompt takes `work_s` on an idle worker."""
        second = self._at(now_s)
        second.num_requests += 1
        second.work_s += work_s

    def refused(self, now_s: float) -> None:
        """Counts a refused request, whose prompt counts as long as the others."""
        second = self._at(now_s)
        second.num_refused += 1
        second.num_ended += 1

    def ended(self, *, in_ttft: bool, in_tpot: bool, now_s: float) -> None:
        """Counts an end."""
        second = self._at(now_s)
        second.num_ended += 1
        second.num_in_ttft += in_ttft
        second.num_in_tpot += in_tpot

    def window(self, seconds: int, now_s: float) -> Traffic:
        """The traffic of the last whole seconds, at most `seconds` and as many as there have been."""
        last = int(now_s)
        first = max(last - seconds, self._seconds[0].number if self._seconds else last)
        within = [second for second in self._seconds if first <= second.number < last]
        num, num_refused = sum(second.num_requests for second in within), sum(second.num_refused for second in within)
        return Traffic(
            float(last - first),
            num + num_refused,
            sum(second.work_s for second in within) * (1 + num_refused / num if num else 1.0),
            sum(second.num_ended for second in within),
            sum(second.num_in_ttft for second in within),
            sum(second.num_in_tpot for second in within),
        )

    def _at(self, now_s: float) -> _Second:
        number = int(now_s)
        if not self._seconds or self._seconds[-1].number < number:
            self._seconds.append(_Second(number))
            while self._seconds[0].number < number - _KEPT_S:
                self._seconds.popleft()
        return self._seconds[-1]
