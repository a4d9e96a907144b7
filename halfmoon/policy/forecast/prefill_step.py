"""A prefill step as the engine's `Scheduler` forms it: by rank; long prompts share it with shorter ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, starmap
from operator import attrgetter
from typing import NamedTuple

from halfmoon.policy.forecast.colocated_workers import Decoding
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule, StepDecodes
from halfmoon.policy.models.latency import PrefillModel, num_pairs
from halfmoon.policy.shared_step import MOST_BEHIND, is_long, share_out

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


class PromptWork(NamedTuple):
    """The work of one prompt on its worker."""

    new_tokens: int  # to be computed
    known_tokens: int  # cached or restored, before them
    priority: int
    ready_s: float  # when the restored part is there
    most_seen: float = math.inf  # by each of its tokens


class PredictedChunk(NamedTuple):
    """The tokens that a step computes of a prompt."""

    prompt: Prompt
    num_tokens: int


class StepRoom(NamedTuple):
    """What a step takes of prompts."""

    tokens: int
    step_tokens: int  # of a whole step, without decodes
    places: int = sys.maxsize  # prompts


class Speed(NamedTuple):
    """How fast a worker computes, alone and with colocated workers."""

    model: PrefillModel
    step_tokens: int
    contention: float = 0.0  # slowdown per busy colocated worker, as a share of the time alone
    chunk_tokens: int = 0  # in place of `step_tokens` in steps that also decode
    chunk_rule: ChunkRule = CONSTANT_CHUNKS  # in place of `chunk_tokens`, where it is known
    max_running: float = math.inf  # sequences in a step
    nests_steps: bool = False  # short prompts run in the middle of its steps (`policy/nested_step.py`)

    def step_room(self, beside: StepDecodes, known_tokens: int) -> StepRoom:
        """What a step takes beside these decodes, if its first prompt has `known_tokens` computed.

        Where decodes have all places, about one becomes free in each step.
        """
        places = int(max(min(self.max_running - beside.batch, sys.maxsize), 1))
        if not beside.batch:
            return StepRoom(self.step_tokens, self.step_tokens, places)
        tokens = self.chunk_rule.tokens(self.chunk_tokens, self.step_tokens, beside, known_tokens)
        return StepRoom(tokens, self.step_tokens, places)

    def chunked_s(self, num_tokens: int) -> float:
        """Seconds to compute a prompt in chunks of the constant length, without the decode part of their steps."""
        num_more = math.ceil(num_tokens / self.chunk_tokens) - 1
        return self.model.seconds(num_tokens) + self.model.a * num_more


def by_rank(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts by priority, then by arrival."""
    return sorted(prompts, key=_rank)


def form_step(queue: Sequence[Prompt], room: StepRoom, now_s: float) -> list[PredictedChunk]:
    """The next step of a queue in rank order: whole prompts, as far as they fit, and a part of the first that does not.

    A long one shares the step with shorter ones of its priority behind it (`shared_step`), as far as it has places.
    """
    step: list[PredictedChunk] = []
    budget = room.tokens
    for at, prompt in enumerate(queue, start=1):
        if prompt.ready_s > now_s:
            continue
        if len(step) == room.places or not budget:
            break
        num_tokens = prompt.new_tokens
        if is_long(num_tokens, budget, room.step_tokens):
            places = min(room.places - len(step) - 1, MOST_BEHIND)
            shorter = _shorter(prompt, islice(queue, at, None), places, now_s)
            num_tokens, others = share_out(num_tokens, shorter, _length, budget, room.step_tokens)
            if others:
                return [*step, PredictedChunk(prompt, num_tokens), *starmap(PredictedChunk, others)]
        step.append(PredictedChunk(prompt, num_tokens))
        budget -= num_tokens
    return step


def _shorter(long: Prompt, behind: Iterable[Prompt], places: int, now_s: float) -> list[Prompt]:
    num_tokens, priority = long.new_tokens, long.priority
    ready = islice((other for other in behind if other.ready_s <= now_s), places)
    return sorted([one for one in ready if one.new_tokens < num_tokens and one.priority == priority], key=_length)


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


def full_steps_s(rest: Sequence[PredictedChunk], speed: Speed, decode_s: float, beside: StepDecodes) -> float:
    """Seconds to compute these prompts in full steps beside the same decodes."""
    room = speed.step_room(beside, 0)
    num_tokens, pairs = sizes(rest)
    num_steps = max(math.ceil(num_tokens / room.tokens), math.ceil(len(rest) / room.places))
    return num_steps * (speed.model.a + decode_s) + speed.model.b * num_tokens + speed.model.c * pairs
