"""When and where a request is tried again after a failed attempt, and when it is given up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

MAX_REFUSALS = 3  # attempts in a row without a token
MAX_FAILOVERS = 2  # attempts that failed after some tokens
_MAX_STALE = 20  # attempts at workers that no longer take such work; gateways know within a moment
_USUAL_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 1_000  # before workers that refused it are tried again
_NOTICE_S = 0.5  # after two losses in a row, for each further attempt: the gateway learns meanwhile who else has died
_SHORTEST_RETRY_MS, _LONGEST_RETRY_MS = 10, 10_000  # `retry_ms_when_full`

Reason = Literal["no room", "lost", "decode lost", "stale"]
"""Why an attempt failed: the decode worker has no room, one of the workers was lost or gave up, it was the decode
worker for certain, or one of them drains or has changed its role."""


class FailedAttempt(NamedTuple):
    """An attempt that may succeed on other workers."""

    reason: Reason
    prefill: str  # worker ids
    decode: str
    gave_tokens: bool
    retry_after_ms: int | None = None  # as the worker replied
    gives_way: bool = False  # other tenants have a better right to the room


class Retries:
    """Owns the failed attempts at one request. Has no clock.

    A request whose answer has begun waits for room until its deadline: its client has already seen a part. So do the
    other outputs of a request, one of which has begun.
    """

    def __init__(self) -> None:
        self._num_refusals = 0  # refusals that count towards giving up
        self._num_in_row = 0  # refusals of any kind
        self._num_failovers = 0
        self._num_stale = 0
        self._has_tokens = False
        self._has_lost = False
        self._num_lost = 0  # since an attempt gave tokens, itself included
        self._last: FailedAttempt | None = None
        self._since_pause: list[FailedAttempt] = []

    @property
    def last_reason(self) -> Reason | None:
        """Why the latest attempt failed; None before any did."""
        return None if self._last is None else self._last.reason

    @property
    def has_lost(self) -> bool:
        """Whether an attempt ended because a worker was lost or gave up: the request was inside."""
        return self._has_lost

    @property
    def notice_s(self) -> float:
        """Pause before any worker is tried, after several were lost with no token between.

        Where a whole host ends, each of its workers is found dead by itself, within moments. An attempt on each would
        give the request up before the gateway knows of all of them, though it may wait for a worker then.
        """
        return _NOTICE_S * max(self._num_lost - 1, 0) if self._is_lost else 0.0

    @property
    def _is_lost(self) -> bool:
        return self._last is not None and self._last.reason in ("lost", "decode lost")

    @property
    def pause_s(self) -> float:
        """Pause before workers are tried again when no other is left; 0 for the first attempt."""
        if self._last is None:
            return 0.0
        suggested_ms = self._last.retry_after_ms or _USUAL_PAUSE_MS
        return (min(suggested_ms, _LONGEST_PAUSE_MS) if self._num_in_row < MAX_REFUSALS else _LONGEST_PAUSE_MS) / 1_000

    def add(self, attempt: FailedAttempt, *, have_others_begun: bool = False) -> bool:
        """Adds a failed attempt at a request, or at one of its outputs. Returns whether there may be another one."""
        self._has_tokens |= attempt.gave_tokens or have_others_begun
        self._num_stale += attempt.reason == "stale"
        self._num_failovers += attempt.gave_tokens
        self._num_in_row = 0 if attempt.gave_tokens else self._num_in_row + (attempt.reason != "stale")
        if attempt.gave_tokens:
            self._num_refusals = 0
        elif attempt.reason != "stale" and not (self._has_tokens and attempt.reason == "no room"):
            self._num_refusals += 1
        self._last = attempt
        self._has_lost |= self._is_lost
        self._num_lost = (0 if attempt.gave_tokens else self._num_lost) + self._is_lost
        self._since_pause.append(attempt)
        if attempt.gives_way and not self._has_tokens:
            return False
        few_stale = self._num_stale <= _MAX_STALE
        return few_stale and self._num_refusals < MAX_REFUSALS and self._num_failovers <= MAX_FAILOVERS

    def exclusions(self) -> list[tuple[str, ...]]:
        """Sets of workers to avoid, the most cautious first.

        Only the decode worker can lack room. Where either worker may have been lost, each is tried without the other;
        a prefill worker that is not to blame has the prompt in its cache. A full decode worker is in every set, or
        else it would be tried again and again without a pause.
        """
        if not self._since_pause:
            return [()]
        decodes = tuple(attempt.decode for attempt in self._since_pause)
        prefills = tuple(attempt.prefill for attempt in self._since_pause if attempt.reason in ("lost", "stale"))
        full = tuple(attempt.decode for attempt in self._since_pause if attempt.reason == "no room")
        return [(*decodes, *prefills), decodes, (*full, *prefills)] if prefills else [decodes]

    def note_pause(self) -> None:
        """Clears the exclusions after a pause: workers that refused the request may have room by now."""
        self._since_pause.clear()


def retry_ms_when_full(step_s: float, steps_left: Iterable[int]) -> int:
    """Retry-After of a full worker: until the first of its sequences ends, with `steps_left` of each.

    step_s: duration of the latest step. A worker without sequences answers with one step.
    """
    return min(max(int(1000 * step_s * min(steps_left, default=1)), _SHORTEST_RETRY_MS), _LONGEST_RETRY_MS)
