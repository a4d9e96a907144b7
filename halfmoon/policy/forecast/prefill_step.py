"""A step of prompts as `engine/scheduler.py` forms it: by rank, what a long one leaves to shorter ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from halfmoon.policy.forecast.colocated_workers import Decoding
from halfmoon.policy.models.latency import PrefillModel

_rank = attrgetter("priority", "order")
_length = attrgetter("new_tokens")


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt as its worker has it, or one that is foreseen to come."""

    request_id: str
    order: int  # of coming
    new_tokens: int  # to be computed
    known_tokens: int  # before them
    priority: int  # smaller goes first
    ready_s: float  # what is restored of it is there
    decoding: Decoding | None

    def without(self, num_tokens: int) -> Prompt:
        """What is left of it when so many tokens more are computed."""
        left, known = self.new_tokens - num_tokens, self.known_tokens + num_tokens
        return Prompt(self.request_id, self.order, left, known, self.priority, self.ready_s, self.decoding)


class PredictedChunk(NamedTuple):
    """What a step computes of a prompt."""

    prompt: Prompt
    num_tokens: int


def by_rank(prompts: Iterable[Prompt]) -> list[Prompt]:
    """By priority, then as they came."""
    return sorted(prompts, key=_rank)


def form_step(queue: Sequence[Prompt], step_tokens: int, now_s: float) -> list[PredictedChunk]:
    """The next step of a queue by rank: all of each, until one is too long for what is left of the step."""
    step: list[PredictedChunk] = []
    budget = step_tokens
    for at, prompt in enumerate(queue, start=1):
        if prompt.ready_s > now_s:
            continue
        if prompt.new_tokens >= budget:
            return step + _shared(prompt, queue[at:], budget, now_s)
        step.append(PredictedChunk(prompt, prompt.new_tokens))
        budget -= prompt.new_tokens
    return step


def _shared(first: Prompt, behind: Iterable[Prompt], budget: int, now_s: float) -> list[PredictedChunk]:
    """What is left of a step, for one that takes all of it: half goes to shorter ones of its priority at most."""
    if first.new_tokens == budget:
        return [PredictedChunk(first, budget)]
    longest, priority = first.new_tokens, first.priority
    shorter = [one for one in behind if one.new_tokens < longest and one.priority == priority and one.ready_s <= now_s]
    left = min(sum([one.new_tokens for one in shorter]), budget // 2)
    step = [PredictedChunk(first, budget - left)]
    for one in sorted(shorter, key=_length):
        if not left:
            break
        num_tokens = min(one.new_tokens, left)
        left -= num_tokens
        step.append(PredictedChunk(one, num_tokens))
    return step


def work_s(step: Sequence[PredictedChunk], model: PrefillModel) -> float:
    """Seconds of a step alone."""
    num_tokens, num_pairs = sizes(step)
    return model.a + model.b * num_tokens + model.c * num_pairs if num_tokens else 0.0


def sizes(step: Sequence[PredictedChunk]) -> tuple[int, float]:
    """Tokens, and pairs of each with those that it attends to."""
    num_tokens, num_pairs = 0, 0.0
    for prompt, num_new in step:
        num_tokens += num_new
        num_pairs += num_new * (prompt.known_tokens + num_new / 2)
    return num_tokens, num_pairs
