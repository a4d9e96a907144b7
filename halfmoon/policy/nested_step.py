"""Which prompts run in the middle of a running prefill step, between two of its layers: one rule for all.

Engine, simulator and forecasts call it. Operator-level preemption, as in FlowPrefill (arXiv 2602.16603): steps may be
long, for throughput, and a short prompt that arrives meanwhile does not wait for the end of one. It runs in a *nested*
step, whole, so that its first token comes with it; then the *outer* step goes on where it was. Nothing is computed
twice.

A prompt runs nested if the sum of waits falls: it gains what is left of the outer step at least, and each prompt of
that step loses the time of the nested one. Time is counted in tokens, and launching a step as some of them. All nested
steps count at most as many tokens as the outer step has, so that a prompt takes about twice its steps at most, and one
of them half as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple, TypeVar

Prompt = TypeVar("Prompt")

# As how many tokens a nested step counts at least. A step of few tokens takes 9 ms on a CPU where a token takes 0.6;
# and without a share, 40 turns of 8 tokens a second made prompts of 1,024 take 29 s instead of 2.
_LEAST_TOKENS = 16
_LEAST_SHARE = 0.125  # of the outer step's


def nested_cost(num_tokens: int, outer_tokens: int) -> int:
    """As how many tokens a nested step counts in an outer one of `outer_tokens`."""
    return max(num_tokens, _LEAST_TOKENS, int(_LEAST_SHARE * outer_tokens))


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


def admit_nested(
    outer: OuterStep,
    newcomers: Iterable[Prompt],
    tokens_of: Callable[[Prompt], int],
    admit: Callable[[Prompt], bool],
) -> list[Prompt]:
    """Admits the prompts of the next nested step, the shortest first, and returns those that run.

    `newcomers` have arrived since the outer step began, or since this was last called; each is looked at once.
    `tokens_of` a prompt are those to compute. Admitting one may evict what another would have found in the cache: if
    that is too long when it is `admit`ted, it has its room and runs in the next step, as do all behind it.
    """
    result: list[Prompt] = []
    room, most_tokens = outer.room, outer.most_tokens
    for num_tokens, prompt in sorted([(tokens_of(prompt), prompt) for prompt in newcomers], key=itemgetter(0)):
        if num_tokens > min(room, most_tokens) or not admit(prompt):
            break
        num_tokens = tokens_of(prompt)
        if num_tokens > min(room, most_tokens):
            break
        room -= num_tokens
        result.append(prompt)
    return result
