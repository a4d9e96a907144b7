"""The prompts of one worker, by what it said last and by what this gateway sent it since."""

from __future__ import annotations

from collections.abc import Hashable

from halfmoon.policy.models.latency import PrefillModel


class ReportedPrompts:
    """Owns how many tokens the worker said that wait there, when that was, and those that were sent since.

    What it has done since its report is told by the time alone. To take off what was computed of this gateway's
    prompts, too, would count it twice: it was computed in that time, and part of it before the report.

    Owns, too, how much of it is surely not of this gateway. What caches have of a prompt waits until the worker looks,
    and then takes no time: a worker's figure and what this gateway expects of its own prompts differ by far more than
    others have there. So all of each prompt of its own is taken off what the worker said.
    """

    __slots__ = ("_num_others", "_num_own", "_num_reported", "_num_sent", "_own", "_reported_s", "_sent")

    def __init__(self, now_s: float) -> None:
        """Of a worker that comes with none."""
        self._reported_s = now_s
        self._num_reported = 0
        self._num_others = 0
        self._own: dict[Hashable, int] = {}  # tokens by request
        self._num_own = 0
        self._sent: set[Hashable] = set()  # of them, since the report
        self._num_sent = 0

    @property
    def num_waiting(self) -> int:
        """Tokens that were there at the last report, and those that came since and are not computed."""
        return self._num_reported + self._num_sent

    def report(self, num_tokens: int, now_s: float) -> None:
        """So many tokens are not computed yet. What was sent before is among them."""
        self._reported_s = now_s
        self._num_reported = num_tokens
        self._num_others = max(num_tokens - self._num_own, 0)
        self._sent.clear()
        self._num_sent = 0

    def send(self, request_id: Hashable, num_tokens: int) -> None:
        """A prompt is on its way there."""
        self.remove(request_id)
        self._own[request_id] = num_tokens
        self._num_own += num_tokens
        self._sent.add(request_id)
        self._num_sent += num_tokens

    def remove(self, request_id: Hashable) -> None:
        """It is computed, or not there any more."""
        num_tokens = self._own.pop(request_id, 0)
        self._num_own -= num_tokens
        if request_id in self._sent:
            self._sent.remove(request_id)
            self._num_sent -= num_tokens

    def free_s(self, model: PrefillModel) -> float:
        """When it will have computed the prompts that it said it has."""
        return self._reported_s + model.b * self._num_reported

    def others_s(self, model: PrefillModel) -> float:
        """What those that are surely not of this gateway took, at the report."""
        return model.b * self._num_others
