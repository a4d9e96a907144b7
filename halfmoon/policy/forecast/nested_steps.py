"""The steps in the middle of a worker's running step: which prompts they compute, when, and what time they take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, PromptWork, Speed, sizes, work_s
from halfmoon.policy.nested_step import OuterStep, nested_cost


class Turn(NamedTuple):
    """The nested step in which a prompt that comes now would run."""

    begins_s: float
    ends_s: float  # without that prompt; `begins_s` if it has no other prompts
    num_tokens: int  # of its other prompts
    adds_s: float  # what that prompt adds to it, alone


@dataclass(slots=True)
class _NestedStep:
    begins_s: float
    ends_s: float
    num_tokens: int
    left: dict[str, int]  # tokens of each prompt that is not computed yet


class NestedSteps:
    """Owns the nested steps of one running step, in the order of time.

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

    def turn(
        self,
        work: PromptWork,
        queued: Collection[Prompt],
        outer: Sequence[PredictedChunk],
        outer_began_s: float,
        speed: Speed,
        slowdown: float,
        now_s: float,
    ) -> Turn | None:
        """The nested step of `outer` in which a prompt would run that comes now; None if it would not (`nested_step`).

        `queued` are all prompts on the worker. All of them must have places, and none a higher priority.

        Of those that come during a nested step and have no room in the next one together, the first run, not the
        shortest.
        """
        if work.ready_s > -math.inf or work.most_seen < math.inf or _are_ahead(queued, work, speed):
            return None
        begins_s, ends_s, num_tokens = self._next(now_s)
        outer_tokens, _ = sizes(outer)
        before = self._steps[:-1] if num_tokens else self._steps
        num_before = sum(nested_cost(step.num_tokens, outer_tokens) for step in before)
        before_s = self.seconds - (ends_s - begins_s)
        outer_s = slowdown * work_s(outer, speed.model)
        left = max(1 - (begins_s - outer_began_s - before_s) / outer_s, 0.0) if outer_s else 0.0
        step = OuterStep(outer_tokens, len(outer), left, num_before)
        if work.new_tokens > min(step.most_tokens, step.room - num_tokens):
            return None
        adds_s = speed.model.seconds(work.new_tokens, work.known_tokens, work.most_seen)
        return Turn(begins_s, ends_s, num_tokens, adds_s - (speed.model.a if num_tokens else 0.0))

    def _next(self, now_s: float) -> tuple[float, float, int]:
        """Begin, end and tokens of the nested step that a prompt joins which comes now; those of an empty one, too."""
        last = self._steps[-1] if self._steps else None
        if last is None or last.ends_s <= now_s:
            return now_s, now_s, 0
        if last.begins_s <= now_s:
            return last.ends_s, last.ends_s, 0
        return last.begins_s, last.ends_s, last.num_tokens

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
            if not step.num_tokens:
                del self._steps[at]

    def _index(self, request_id: str) -> int | None:
        return next((at for at, step in enumerate(self._steps) if request_id in step.left), None)

    def _shift(self, at: int, by_s: float) -> None:
        """Has a step end `by_s` later, and those after it begin and end so."""
        self._steps[at].ends_s += by_s
        self.seconds += by_s
        for step in self._steps[at + 1 :]:
            step.begins_s += by_s
            step.ends_s += by_s


def _are_ahead(queued: Collection[Prompt], work: PromptWork, speed: Speed) -> bool:
    """Whether not all have places, or one has a higher priority."""
    return len(queued) >= speed.max_running or any(one.priority < work.priority for one in queued)
