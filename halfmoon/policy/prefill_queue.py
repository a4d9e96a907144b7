"""When a prefill worker will have computed the prompts that were placed on it."""

from __future__ import annotations


class PrefillQueue:
    """Owns the prompts of one worker that are not computed yet, in the order of placing, each with its prediction."""

    def __init__(self) -> None:
        self._predicted_s: dict[str, float] = {}
        self._begun_s = 0.0  # when the first of them began

    def add(self, request_id: str, predicted_s: float, now_s: float) -> None:
        """A prompt that takes `predicted_s` once it is its turn."""
        if not self._predicted_s:
            self._begun_s = now_s
        self._predicted_s[request_id] = predicted_s

    def remove(self, request_id: str, now_s: float) -> None:
        """It is computed, or will not be; nothing where it never was."""
        if next(iter(self._predicted_s), None) == request_id:
            self._begun_s = now_s
        self._predicted_s.pop(request_id, None)

    def free_s(self, now_s: float) -> float:
        """When all of them are done, as predicted; the first one, if overdue, at once."""
        if not self._predicted_s:
            return now_s
        first_s, *rest_s = self._predicted_s.values()
        return max(self._begun_s + first_s, now_s) + sum(rest_s)
