"""The points of a sweep. Lengths and batch sizes double, with points halfway between, as far as there is room. Pure.

Every other length is held out: the fit uses the other points and is checked at these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.profiling.target import Target

_FIRST_PROMPT = 16
_FIRST_CONTEXT = 64
_CONTEXT_FACTOR = 4
_ROOM_SHARE = 0.8  # of the KV memory, for a batch


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """How far a sweep goes, within the worker's own limits."""

    longest_prompt: int = 2048
    largest_batch: int = 16
    longest_context: int = 1024  # of each sequence of a batch
    repeats: int = 3
    steps: int = 12  # of each batch


class PromptPoint(NamedTuple):
    """A prompt after a cached prefix."""

    new_tokens: int
    cached_tokens: int
    is_held_out: bool


class BatchPoint(NamedTuple):
    """Sequences that decode together, each with `context_tokens`."""

    batch: int
    context_tokens: int
    is_held_out: bool


def prompt_points(target: Target, limits: SweepLimits) -> Iterator[PromptPoint]:
    """Lengths without a prefix, then some after one."""
    most = min(limits.longest_prompt, target.context_tokens - 2, target.kv_tokens - target.layout.block_tokens)
    lengths = [_FIRST_PROMPT * 2**power for power in range(32) if _FIRST_PROMPT * 2**power < most]
    for length in lengths:
        yield PromptPoint(length, 0, is_held_out=False)
        if length >= _FIRST_CONTEXT and 3 * length // 2 < most:
            yield PromptPoint(3 * length // 2, 0, is_held_out=True)
    yield PromptPoint(most, 0, is_held_out=False)
    block_tokens = target.layout.block_tokens
    for new in (_FIRST_CONTEXT, _CONTEXT_FACTOR * _FIRST_CONTEXT):
        for cached in (most // 4, most // 2):
            whole = cached // block_tokens * block_tokens
            if whole and whole + new <= most:
                yield PromptPoint(new, whole, is_held_out=cached == most // 4)


def batch_points(target: Target, limits: SweepLimits) -> Iterator[BatchPoint]:
    """Batches of short, longer and long sequences, as far as they fit."""
    room = int(_ROOM_SHARE * target.kv_tokens)
    most = min(limits.largest_batch, target.max_running)
    batches = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
    between = [3 * batch // 2 for batch in batches if batch > 1 and 3 * batch // 2 < most]
    contexts = [_FIRST_CONTEXT * _CONTEXT_FACTOR**power for power in range(8)]
    longest = min(limits.longest_context, target.context_tokens - 2 * limits.steps)
    for context in [context_tokens for context_tokens in contexts if context_tokens <= longest] or [max(longest, 1)]:
        for batch in sorted([*batches, *between]):
            own = (
                context + target.layout.block_tokens + 2 * limits.steps + 8 * batch
            )  # steps that the first sequences decode meanwhile
            if batch * own <= room and own <= target.context_tokens:
                yield BatchPoint(batch, context, is_held_out=batch in between)


def transfer_points(target: Target, limits: SweepLimits) -> Iterator[int]:
    """Tokens of hand-overs."""
    most = min(limits.longest_prompt, target.context_tokens - 2, target.kv_tokens - target.layout.block_tokens)
    return iter(sorted({min(one, most) for one in (64, 256, 1024, 2048)}))
