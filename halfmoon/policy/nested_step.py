"""Which prompts run in the middle of a running prefill step, between two of its layers: one rule for all.

Engine, simulator and forecasts call it. Operator-level preemption, as in FlowPrefill (arXiv 2602.16603): steps may be
long, for throughput, and a short prompt that arrives meanwhile does not wait for the end of one. It runs in a *nested*
step, whole, so that its first token comes with it; then the *outer* step goes on where it was. Nothing is computed
twice.

A prompt runs nested if the sum of waits falls: it gains what is left of the outer step, and each prompt of that step
loses the time of the nested one. Time is counted in tokens, and a nested step as an eighth of the outer one's at least,
since launching it takes time, too. All nested steps count at most as many as the outer step has, so that no prompt
waits for more than about twice its steps, and one of them half as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from halfmoon.policy.shared_step import QueuedPrompt, ToAdmit, shorter_ones

_LEAST_SHARE = 0.125  # without it, 40 turns of 8 tokens a second make a prompt of 1,024 take 29 s instead of 2


def nested_cost(num_tokens: int, outer_tokens: int) -> int:
    """As how many tokens a nested step counts in an outer one of `outer_tokens`."""
    return max(num_tokens, int(_LEAST_SHARE * outer_tokens))


class OuterStep(NamedTuple):
    """A running step of prompts alone."""

    num_tokens: int
    num_prompts: int
    left: float  # share of it that is not computed yet
    num_nested: int = 0  # tokens as which its nested steps so far count (`nested_cost`)

    @property
    def room(self) -> int:
        """Most tokens of a nested step."""
        return min(self.num_tokens // 2, self.num_tokens - self.num_nested)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt that runs nested; 0: none does."""
        most = min(self.room, math.ceil(self.left * self.num_tokens / self.num_prompts) - 1)
        return most if most >= nested_cost(0, self.num_tokens) else 0


def choose_nested(
    outer: OuterStep,
    newcomers: Iterable[QueuedPrompt],
    num_blocks: int,
    num_places: int,
    to_admit: Callable[[QueuedPrompt], ToAdmit | None],
    tokens_of: Callable[[QueuedPrompt, int], int],
) -> list[tuple[int, QueuedPrompt]]:
    """The prompts of the next nested step and before each its tokens, the fewest first.

    `newcomers` have arrived since the outer step began, or since this was last asked, and each is looked at once. The
    other arguments are those of `shorter_ones`; `tokens_of` are 0 for one that may not run nested.
    """
    result: list[tuple[int, QueuedPrompt]] = []
    room = outer.room
    for num_tokens, prompt in shorter_ones(
        outer.most_tokens + 1, newcomers, num_blocks, num_places, to_admit, tokens_of
    ):
        room -= num_tokens
        if room < 0:
            break
        result.append((num_tokens, prompt))
    return result
