"""A prefill step as the engine's `Scheduler` forms it: by rank; a long prompt leaves part of it to shorter ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from halfmoon.policy.forecast.colocated_workers import Decoding
from halfmoon.policy.models.latency import PrefillModel, num_pairs

_rank = attrgetter("priority", "order")
_length = attrgetter("new_tokens")


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt queued on a worker, or one that is expected to arrive."""

    request_id: str
    order: int  # of arrival
    new_tokens: int  # to be computed
    known_tokens: int  # cached, restored or computed, before them
    priority: int  # smaller goes first
    ready_s: float  # when the restored part is there
    most_seen: float  # by each of its tokens
    decoding: Decoding | None

    def without(self, num_tokens: int) -> Prompt:
        """The prompt after `num_tokens` more have been computed."""
        left, known = self.new_tokens - num_tokens, self.known_tokens + num_tokens
        name, order, priority, ready_s = self.request_id, self.order, self.priority, self.ready_s
        return Prompt(name, order, left, known, priority, ready_s, self.most_seen, self.decoding)


class PredictedChunk(NamedTuple):
    """The tokens that a step computes of a prompt."""

    prompt: Prompt
    num_tokens: int


class StepRoom(NamedTuple):
    """What a step takes of prompts."""

    tokens: int
    places: int = sys.maxsize  # prompts


def by_rank(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts by priority, then by arrival."""
    return sorted(prompts, key=_rank)


def form_step(queue: Sequence[Prompt], room: StepRoom, now_s: float) -> list[PredictedChunk]:
    """The next step of a queue in rank order: whole prompts, until one is too long for the rest of the step."""
    step: list[PredictedChunk] = []
    budget = room.tokens
    for at, prompt in enumerate(queue, start=1):
        if prompt.ready_s > now_s:
            continue
        if len(step) == room.places:
            break
        if prompt.new_tokens >= budget:
            behind = (other for other in islice(queue, at, None) if other.ready_s <= now_s)
            return step + _shared(prompt, islice(behind, room.places - len(step) - 1), budget)
        step.append(PredictedChunk(prompt, prompt.new_tokens))
        budget -= prompt.new_tokens
    return step


def _shared(first: Prompt, behind: Iterable[Prompt], budget: int) -> list[PredictedChunk]:
    """The rest of a step for a prompt that fills it: up to half goes to shorter ones of its priority.

    Those `behind` it are ready.
    """
    if first.new_tokens == budget:
        return [PredictedChunk(first, budget)]
    longest, priority = first.new_tokens, first.priority
    shorter = [prompt for prompt in behind if prompt.priority == priority and prompt.new_tokens < longest]
    left = min(sum([prompt.new_tokens for prompt in shorter]), budget // 2)
    step = [PredictedChunk(first, budget - left)]
    for prompt in sorted(shorter, key=_length):
        if not left:
            break
        num_tokens = min(prompt.new_tokens, left)
        left -= num_tokens
        step.append(PredictedChunk(prompt, num_tokens))
    return step


def work_s(step: Sequence[PredictedChunk], model: PrefillModel) -> float:
    """Seconds of a step without interference."""
    num_tokens, pairs = sizes(step)
    return model.a + model.b * num_tokens + model.c * pairs if num_tokens else 0.0


def sizes(step: Sequence[PredictedChunk]) -> tuple[int, float]:
    """The tokens of a step, and its pairs of a token and one it attends to."""
    num_tokens, pairs = 0, 0.0
    for prompt, num_new in step:
        num_tokens += num_new
        pairs += num_pairs(prompt.known_tokens, num_new, prompt.most_seen)
    return num_tokens, pairs


def tokens_of(order: int, step: Sequence[PredictedChunk]) -> int:
    """Tokens of a step that belong to the prompt of this order."""
    for prompt, num_tokens in step:
        if prompt.order == order:
            return num_tokens
    return 0


def queued_tokens(step: Sequence[PredictedChunk]) -> int:
    """Tokens of a step that belong to queued prompts, neither expected ones nor the one in question."""
    return sum([num_tokens for prompt, num_tokens in step if prompt.request_id])
