"""The prompts of one worker while future steps are followed: what each step computes, and what it leaves."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, StepRoom, by_rank, form_step
from halfmoon.policy.shared_step import MOST_BEHIND

_rank = attrgetter("priority", "order")
_length = attrgetter("new_tokens", "priority", "order")


class PendingPrompts:
    """Owns what future steps leave of prompts. Does not change a `Prompt`: the rest of one is a new one.

    Its steps are those of `form_step`. The cost of a step does not grow with the queue behind it: the prompts that
    share a step with a longer one are found in a second order, by length, kept from the first such step on.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        """The `order` of each prompt is unique."""
        self._queue = by_rank(prompts)
        self._by_length: list[Prompt] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def ready_s(self) -> float:
        """When the first prompt is ready. There must be a prompt."""
        return min(prompt.ready_s for prompt in self._queue)

    def known_tokens(self, now_s: float) -> int | None:
        """Tokens known of the first prompt that is ready; None if none is."""
        return next((prompt.known_tokens for prompt in self._queue if prompt.ready_s <= now_s), None)

    def add(self, prompt: Prompt) -> None:
        """Adds a prompt that arrived meanwhile."""
        insort(self._queue, prompt, key=_rank)
        if self._by_length is not None:
            insort(self._by_length, prompt, key=_length)

    def next_step(self, room: StepRoom, now_s: float) -> list[PredictedChunk]:
        """The step that begins now."""
        has_places = len(self._queue) <= min(room.places, MOST_BEHIND)
        return form_step(self._queue, room, now_s, self._shorter_than if has_places else None)

    def end(self, step: Sequence[PredictedChunk]) -> list[Prompt]:
        """Ends the step. Returns the prompts that it completed, which are removed."""
        computed = []
        for prompt, num_tokens in step:
            at = self._queue.index(prompt)  # usually among the first
            if num_tokens < prompt.new_tokens:
                left = self._queue[at] = prompt.without(num_tokens)
                self._replace(prompt, left)
            else:
                del self._queue[at]
                self._replace(prompt, None)
                computed.append(prompt)
        return computed

    def until(self, order: int) -> list[PredictedChunk]:
        """The prompts that go before the one of this order, which is the last, as if one step computed all."""
        at = next(at for at, prompt in enumerate(self._queue) if prompt.order == order)
        return [PredictedChunk(prompt, prompt.new_tokens) for prompt in self._queue[: at + 1]]

    def _shorter_than(self, first: Prompt, now_s: float) -> Iterable[Prompt]:
        """The prompts that may share a step with a long one, the shortest first."""
        for prompt in self._ascending():
            if prompt.new_tokens >= first.new_tokens:
                return
            if prompt.priority == first.priority and prompt.order > first.order and prompt.ready_s <= now_s:
                yield prompt

    def _ascending(self) -> list[Prompt]:
        """The prompts by length, then by rank."""
        if self._by_length is None:
            self._by_length = sorted(self._queue, key=_length)
        return self._by_length

    def _replace(self, prompt: Prompt, left: Prompt | None) -> None:
        if self._by_length is not None:
            self._by_length.remove(prompt)
            if left is not None:
                insort(self._by_length, left, key=_length)
