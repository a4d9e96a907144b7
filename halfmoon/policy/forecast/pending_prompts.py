"""One worker's prompts while steps to come are gone through: what each step computes, and who is left behind it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, by_rank

_rank = attrgetter("priority", "order")
_length = attrgetter("new_tokens", "priority", "order")


class PendingPrompts:
    """Owns what steps to come leave of prompts that stay as they are: what is left of one is another one.

    Its steps are those of `form_step`. A step costs what it computes, however many wait behind it: those that share
    steps with a longer one are found in an order of their own, by length, which is kept from the first such step on.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        """Each has an `order` of its own."""
        self._queue = by_rank(prompts)
        self._by_length: list[Prompt] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def ready_s(self) -> float:
        """When the first of those prompts can be computed of which something is restored; there must be one."""
        return min(prompt.ready_s for prompt in self._queue)

    def add(self, prompt: Prompt) -> None:
        """One that came meanwhile."""
        insort(self._queue, prompt, key=_rank)
        if self._by_length is not None:
            insort(self._by_length, prompt, key=_length)

    def next_step(self, step_tokens: int, now_s: float) -> list[PredictedChunk]:
        """The step that begins now: all of each prompt by rank, until one is too long for what is left of the step."""
        step: list[PredictedChunk] = []
        budget = step_tokens
        for prompt in self._queue:
            if prompt.ready_s > now_s:
                continue
            if prompt.new_tokens >= budget:
                return step + self._shared(prompt, budget, now_s)
            step.append(PredictedChunk(prompt, prompt.new_tokens))
            budget -= prompt.new_tokens
        return step

    def end(self, step: Sequence[PredictedChunk]) -> list[Prompt]:
        """The step is over: the prompts that are computed, and so left."""
        computed = []
        for prompt, num_tokens in step:
            at = self._queue.index(prompt)  # mostly among the first
            if num_tokens < prompt.new_tokens:
                left = self._queue[at] = prompt.without(num_tokens)
                self._replace(prompt, left)
            else:
                del self._queue[at]
                self._replace(prompt, None)
                computed.append(prompt)
        return computed

    def _shared(self, first: Prompt, budget: int, now_s: float) -> list[PredictedChunk]:
        """What is left of a step, for one that takes all of it: half goes to shorter ones behind it at most."""
        if first.new_tokens == budget:
            return [PredictedChunk(first, budget)]
        left = budget // 2
        shares: list[PredictedChunk] = []
        for one in self._ascending():
            if one.new_tokens >= first.new_tokens or not left:
                break
            if one.priority == first.priority and one.order > first.order and one.ready_s <= now_s:
                num_tokens = min(one.new_tokens, left)
                left -= num_tokens
                shares.append(PredictedChunk(one, num_tokens))
        return [PredictedChunk(first, budget - budget // 2 + left), *shares]

    def _ascending(self) -> list[Prompt]:
        """By length, then by rank."""
        if self._by_length is None:
            self._by_length = sorted(self._queue, key=_length)
        return self._by_length

    def _replace(self, prompt: Prompt, left: Prompt | None) -> None:
        if self._by_length is not None:
            self._by_length.remove(prompt)
            if left is not None:
                insort(self._by_length, left, key=_length)
