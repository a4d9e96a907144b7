"""Finds stop strings in text that comes in pieces. The result does not depend on where the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Owns the text that is held back because a stop string may begin in it."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """With `keep`, the stop string is part of the text that it ends."""
        assert all(stops)
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    @property
    def pending(self) -> str:
        """The text that is held back."""
        return self._held

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Returns the text that has become certain. Sets `matched` at the first complete stop string.

        One that is complete where the text must not end is text like any other.
        """
        if not self._stops:
            return text
        num_before, text, self._held = len(self._held), self._held + text, ""
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]
        if ends and may_end:
            end, start, self.matched = min(ends)
            return text[: end if self._keep else start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the held text at the end: it was not a stop string."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        tail = text[len(text) - longest :]
        if not any(stop[0] in tail for stop in self._stops):  # the usual case
            return 0
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
