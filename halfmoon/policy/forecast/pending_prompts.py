"""The prompts of one worker while future steps are followed: what each step computes, and what it leaves."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, StepRoom, by_rank, form_step

_rank = attrgetter("priority", "order")


class PendingPrompts:
    """Owns what future steps leave of prompts. Does not change a `Prompt`: the rest of one is a new one."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        """The `order` of each prompt is unique."""
        self._queue = by_rank(prompts)

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

    def next_step(self, room: StepRoom, now_s: float) -> list[PredictedChunk]:
        """The step that begins now."""
        return form_step(self._queue, room, now_s)

    def end(self, step: Sequence[PredictedChunk]) -> list[Prompt]:
        """Ends the step. Returns the prompts that it completed, which are removed."""
        computed = []
        for prompt, num_tokens in step:
            at = self._queue.index(prompt)  # usually among the first
            if num_tokens < prompt.new_tokens:
                self._queue[at] = prompt.without(num_tokens)
            else:
                del self._queue[at]
                computed.append(prompt)
        return computed

    def until(self, order: int) -> list[PredictedChunk]:
        """The prompts that go before the one of this order, which is the last, as if one step computed all."""
        at = next(at for at, prompt in enumerate(self._queue) if prompt.order == order)
        return [PredictedChunk(prompt, prompt.new_tokens) for prompt in self._queue[: at + 1]]
