"""The prompts of one worker, from its latest report and what this gateway has sent since."""

from __future__ import annotations

from collections.abc import Hashable

from halfmoon.policy.models.latency import PrefillModel


class ReportedPrompts:
    """Owns the waiting tokens that the worker reported, the time of that report, and the tokens sent since.

    Progress since the report follows from time alone. Subtracting this gateway's computed prompts as well would count
    them twice: they were computed in that time, and in part before the report.

    Also owns how much of the report is certainly from other gateways. A cached part of a prompt counts as waiting until
    the worker looks, and then takes no time, so the report and this gateway's expectation of its own prompts differ by
    far more than others have there. Therefore its own prompts are subtracted as a whole.
    """

    __slots__ = ("_num_others", "_num_own", "_num_reported", "_num_sent", "_own", "_reported_s", "_sent")

    def __init__(self, now_s: float) -> None:
        """Starts with a worker that has no prompts."""
        self._reported_s = now_s
        self._num_reported = 0
        self._num_others = 0
        self._own: dict[Hashable, int] = {}  # tokens by request
        self._num_own = 0
        self._sent: set[Hashable] = set()  # own requests sent since the report
        self._num_sent = 0

    @property
    def num_waiting(self) -> int:
        """Tokens of the latest report, plus those sent since and not computed."""
        return self._num_reported + self._num_sent

    def report(self, num_tokens: int, now_s: float) -> None:
        """Notes a report of `num_tokens` not yet computed, including prompts sent before."""
        self._reported_s = now_s
        self._num_reported = num_tokens
        self._num_others = max(num_tokens - self._num_own, 0)
        self._sent.clear()
        self._num_sent = 0

    def send(self, request_id: Hashable, num_tokens: int) -> None:
        """Adds a prompt that is on its way."""
        self.remove(request_id)
        self._own[request_id] = num_tokens
        self._num_own += num_tokens
        self._sent.add(request_id)
        self._num_sent += num_tokens

    def remove(self, request_id: Hashable) -> None:
        """Removes a prompt that is computed, or no longer there."""
        num_tokens = self._own.pop(request_id, 0)
        self._num_own -= num_tokens
        if request_id in self._sent:
            self._sent.remove(request_id)
            self._num_sent -= num_tokens

    def free_s(self, model: PrefillModel) -> float:
        """When the worker will have computed the prompts in its report."""
        return self._reported_s + model.b * self._num_reported

    def others_s(self, model: PrefillModel) -> float:
        """Work in the report that is certainly from other gateways, in seconds."""
        return model.b * self._num_others
