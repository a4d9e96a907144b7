"""A prompt that several workers compute together: how it is cut into segments, and how long they take.

The segments go to the workers in turn, one a step. A step's layer waits for the same layer of the segments before it,
so all workers compute at once, each a little behind the one before (KV-Runahead, arXiv 2405.05329, section 3.2, in
rounds). Later segments attend to more: those of a round differ in length, so that they take the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from halfmoon.policy.models.latency import PrefillModel

SEGMENT_PASSES = 16  # most parts in which the layers of a segment travel
SEGMENT_OVERHEAD_S = 0.02  # of a round: a cautious guess for calls, copies and late layers (docs/log/policy.md)
MAX_ROUND_S = 20.0  # workers await a segment for a minute at most, and allow for three times its predicted time
_MAX_ROUNDS = 64
_HALVINGS = 20  # of the interval in which a round's time is searched


class SegmentWorker(NamedTuple):
    """What is known of one of the workers."""

    model: PrefillModel  # beside the others
    step_tokens: int  # most of one step
    ready_s: float = 0.0  # from now, until it can begin
    receive_s_per_token: float = 0.0  # KV of all layers, from one of the others


class SegmentPlan(NamedTuple):
    """Segment `i` ends before token `ends[i]` and is computed by worker `i % degree`; the last worker has the last."""

    degree: int
    ends: tuple[int, ...]
    round_s: float  # computing the segment that takes longest
    seconds: float  # from now to the first token

    @property
    def num_rounds(self) -> int:
        """Segments of each worker."""
        return len(self.ends) // self.degree


def plan_segments(
    workers: Sequence[SegmentWorker], num_tokens: int, num_cached: int, block_tokens: int, num_passes: int
) -> SegmentPlan | None:
    """Cuts what follows the `num_cached` tokens that all workers have into as few rounds as steps allow, or one more.

    One more, if the steps' limit leaves no room to even segments out. No round takes more than `MAX_ROUND_S`.
    num_passes: parts in which a segment's layers travel. Segments are whole blocks, but for the last one. None if the
    prompt is too short for these workers, or takes more than 64 rounds.
    """
    start = _whole(num_cached, block_tokens)
    room = sum(_whole(worker.step_tokens, block_tokens) for worker in workers)
    if not room or num_tokens <= start or len(workers) < 2:
        return None
    together_s = 1 / sum(1 / worker.model.seconds(num_tokens - start, start) for worker in workers)
    num_rounds = max(math.ceil((num_tokens - start) / room), math.ceil(together_s / MAX_ROUND_S))
    if num_rounds > _MAX_ROUNDS:
        return None
    plans = [
        _timed(workers, start, ends, num_passes)
        for rounds in (num_rounds, num_rounds + 1)
        if (ends := _even(workers, num_tokens, start, block_tokens, rounds)) is not None
    ]
    brief = [plan for plan in plans if plan.round_s <= MAX_ROUND_S]
    return min(brief, key=lambda plan: plan.seconds, default=None)


def _even(
    workers: Sequence[SegmentWorker], num_tokens: int, start: int, block_tokens: int, num_rounds: int
) -> tuple[int, ...] | None:
    """The ends of segments that take as long as each other, where steps allow it."""
    most_s = max(worker.model.seconds(worker.step_tokens, num_tokens) for worker in workers)
    least_s, ends = 0.0, _cut(workers, num_tokens, start, block_tokens, most_s, num_rounds)
    if ends is None:
        return None
    for _ in range(_HALVINGS):
        middle_s = (least_s + most_s) / 2
        shorter = _cut(workers, num_tokens, start, block_tokens, middle_s, num_rounds)
        if shorter is None:
            least_s = middle_s
        else:
            most_s, ends = middle_s, shorter
    return tuple(ends) if len(ends) == num_rounds * len(workers) else None


def _cut(
    workers: Sequence[SegmentWorker], num_tokens: int, start: int, block_tokens: int, round_s: float, num_rounds: int
) -> list[int] | None:
    """The ends of segments that take at most `round_s` each; None if they do not reach the prompt's end."""
    ends: list[int] = []
    for _ in range(num_rounds):
        for worker in workers:
            length = min(_tokens_in(worker.model, start, round_s), worker.step_tokens)
            if start + length >= num_tokens:
                return [*ends, num_tokens]
            length = _whole(length, block_tokens)
            if length == 0:
                return None
            start += length
            ends.append(start)
    return None


def _tokens_in(model: PrefillModel, start: int, seconds: float) -> int:
    """The most tokens after the first `start` that take at most so long: `PrefillModel.seconds` solved for them."""
    left_s, slope = seconds - model.a, model.b + model.c * start
    if left_s <= 0 or slope + model.c <= 0:
        return 0
    return int(2 * left_s / (slope + math.sqrt(slope * slope + 2 * model.c * left_s)))


def _timed(workers: Sequence[SegmentWorker], start: int, ends: tuple[int, ...], num_passes: int) -> SegmentPlan:
    """The plan of these segments: rounds as long as their slowest part, and how far each worker is behind.

    A worker receives in a round what the others compute in it. Each is behind the one before by a layer's part of the
    step, and by that part's way.
    """
    degree, segments = len(workers), list(pairwise((start, *ends)))
    lengths = [end - begin for begin, end in segments]
    times_s = [
        workers[number % degree].model.seconds(end - begin, begin) for number, (begin, end) in enumerate(segments)
    ]
    slowest = max(worker.receive_s_per_token for worker in workers)
    rounds_s = 0.0
    for first in range(0, len(lengths), degree):
        of_round = slice(first, first + degree)
        received = sum(lengths[of_round]) - min(lengths[of_round])
        rounds_s += max(*times_s[of_round], received * slowest) + SEGMENT_OVERHEAD_S
    behind_s = (degree - 1) * (max(times_s) + max(lengths) * slowest) / num_passes
    seconds = max(worker.ready_s for worker in workers) + rounds_s + behind_s
    return SegmentPlan(degree, ends, max(times_s), seconds)


def _whole(num_tokens: int, block_tokens: int) -> int:
    return num_tokens // block_tokens * block_tokens
