"""The steps in the middle of a worker's running step: which prompts they compute, when, and what time they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """The nested step in which a prompt that comes now would run."""

    begins_s: float
    ends_s: float  # without that prompt; `begins_s` if it has no other prompts
    num_tokens: int  # of its other prompts
    num_before: int  # tokens of the nested steps before it
    before_s: float  # that these take, or took


@dataclass(slots=True)
class _NestedStep:
    begins_s: float
    ends_s: float
    num_tokens: int
    left: dict[str, int]  # tokens of each prompt that is not computed yet


class NestedSteps:
    """Owns the nested steps of one running step, in the order of time. Which prompts run nested is decided elsewhere.

    They follow one another. A prompt that comes while one runs is in the next one.
    """

    def __init__(self) -> None:
        self._steps: list[_NestedStep] = []
        self.num_tokens = 0  # of all of them
        self.seconds = 0.0  # that they take, or took

    @property
    def request_ids(self) -> Iterator[str]:
        """Requests whose prompts are in them and not computed yet."""
        return (request_id for step in self._steps for request_id in step.left)

    def turn(self, now_s: float) -> Turn:
        """The nested step in which a prompt that comes now would run."""
        last = self._steps[-1] if self._steps else None
        if last is None or last.ends_s <= now_s:
            return Turn(now_s, now_s, 0, self.num_tokens, self.seconds)
        if last.begins_s <= now_s:
            return Turn(last.ends_s, last.ends_s, 0, self.num_tokens, self.seconds)
        num_before, before_s = self.num_tokens - last.num_tokens, self.seconds - (last.ends_s - last.begins_s)
        return Turn(last.begins_s, last.ends_s, last.num_tokens, num_before, before_s)

    def add(self, request_id: str, num_tokens: int, takes_s: float, turn: Turn) -> None:
        """Adds a prompt that takes `takes_s` to its turn, as of now."""
        if not turn.num_tokens:
            self._steps.append(_NestedStep(turn.begins_s, turn.begins_s, 0, {}))
        step = self._steps[-1]
        step.ends_s += takes_s
        step.num_tokens += num_tokens
        step.left[request_id] = num_tokens
        self.num_tokens += num_tokens
        self.seconds += takes_s

    def computed(self, request_id: str, now_s: float) -> bool:
        """Notes the first token of a prompt, and so the end of its step; returns whether it was in one."""
        at = self._index(request_id)
        if at is None:
            return False
        del self._steps[at].left[request_id]
        self._shift(at, now_s - self._steps[at].ends_s)
        return True

    def remove(self, request_id: str, now_s: float) -> None:
        """Removes a prompt that moved or was given up, with the time that it would still take."""
        at = self._index(request_id)
        if at is None:
            return
        step = self._steps[at]
        num_tokens = step.left.pop(request_id)
        takes_s = (step.ends_s - step.begins_s) * num_tokens / step.num_tokens
        self._shift(at, -min(takes_s, max(step.ends_s - now_s, 0.0)))
        if step.begins_s > now_s:
            step.num_tokens -= num_tokens
            self.num_tokens -= num_tokens

    def _index(self, request_id: str) -> int | None:
        return next((at for at, step in enumerate(self._steps) if request_id in step.left), None)

    def _shift(self, at: int, by_s: float) -> None:
        """Has a step end `by_s` later, and those after it begin and end so."""
        self._steps[at].ends_s += by_s
        self.seconds += by_s
        for step in self._steps[at + 1 :]:
            step.begins_s += by_s
            step.ends_s += by_s
