"""When a request whose workers failed it is tried again, where, and when it is given up."""

from __future__ import annotations

from typing import Literal, NamedTuple

MAX_REFUSALS = 3  # attempts in a row that gave no token
MAX_FAILOVERS = 2  # attempts that gave tokens, then failed
_USUAL_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 1_000  # before workers that refused it are asked again

Reason = Literal["no room", "lost"]
"""Why an attempt failed: the decode worker has no room, or either of its workers is lost or gave it up."""


class FailedAttempt(NamedTuple):
    """One attempt that somebody else may do better."""

    reason: Reason
    prefill: str  # worker ids
    decode: str
    gave_tokens: bool
    retry_after_ms: int | None = None  # as the worker said


class Retries:
    """Owns which attempts at one request failed. Has no clock.

    Whose answer has begun waits for room as long as its deadline lets it: its client has seen a part.
    """

    def __init__(self) -> None:
        self._num_refusals = 0  # of those that count
        self._num_in_row = 0  # refusals of any kind
        self._num_failovers = 0
        self._has_tokens = False
        self._last: FailedAttempt | None = None
        self._since_pause: list[FailedAttempt] = []

    @property
    def last_reason(self) -> Reason | None:
        """Why the latest attempt failed; None before any did."""
        return None if self._last is None else self._last.reason

    @property
    def pause_s(self) -> float:
        """Where nobody else is left, before any worker is tried again; 0 for the first attempt."""
        if self._last is None:
            return 0.0
        asked_ms = self._last.retry_after_ms or _USUAL_PAUSE_MS
        return (min(asked_ms, _LONGEST_PAUSE_MS) if self._num_in_row < MAX_REFUSALS else _LONGEST_PAUSE_MS) / 1_000

    def add(self, attempt: FailedAttempt) -> bool:
        """Whether there may be another one."""
        self._has_tokens |= attempt.gave_tokens
        self._num_failovers += attempt.gave_tokens
        self._num_in_row = 0 if attempt.gave_tokens else self._num_in_row + 1
        if attempt.gave_tokens:
            self._num_refusals = 0
        elif not (self._has_tokens and attempt.reason == "no room"):
            self._num_refusals += 1
        self._last = attempt
        self._since_pause.append(attempt)
        return self._num_refusals < MAX_REFUSALS and self._num_failovers <= MAX_FAILOVERS

    def exclusions(self) -> list[tuple[str, ...]]:
        """Sets of workers to avoid, the most cautious first.

        A lack of room is the decode worker's. A loss may be either worker's, so each is tried without the other. A
        decode worker without room is in every set: else it would be asked again and again without a pause.
        """
        if not self._since_pause:
            return [()]
        decodes = tuple(attempt.decode for attempt in self._since_pause)
        prefills = tuple(attempt.prefill for attempt in self._since_pause if attempt.reason == "lost")
        full = tuple(attempt.decode for attempt in self._since_pause if attempt.reason == "no room")
        return [(*decodes, *prefills), decodes, (*full, *prefills)] if prefills else [decodes]

    def note_pause(self) -> None:
        """Nobody was left; who refused it may have room by now."""
        self._since_pause.clear()
