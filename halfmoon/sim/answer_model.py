"""Text and length of simulated answers: functions of the request alone, so any worker can continue an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import NormalDist
from typing import Literal

TextKind = Literal["random", "echo"]
LengthKind = Literal["drawn", "seed"]

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()
_SIGMA = 0.8  # standard deviation of the natural logarithm of a drawn length


@dataclass(frozen=True, slots=True)
class AnswerModel:
    """How simulated answers are made.

    text: `random` draws tokens from the middle of the vocabulary, where the words are (special tokens stand at its
    ends); `echo` repeats the prompt.

    length: applies unless the request ignores the end of sequence. `drawn` is lognormal around `median_tokens` and
    depends on the request's seed. With `seed` the seed is the length; a replayed trace uses this to hide from the
    gateway how long an answer will be.
    """

    vocab_size: int
    text: TextKind = "random"
    length: LengthKind = "drawn"
    median_tokens: int = 200

    def num_tokens(self, seed: int, max_tokens: int, min_tokens: int = 0, *, ignore_eos: bool = False) -> int:
        """Length of the answer in tokens."""
        if ignore_eos:
            return max_tokens
        drawn = seed
        if self.length == "drawn":
            uniform = (_mixed(seed) + 1) / (_MASK + 2)
            drawn = round(self.median_tokens * exp(_SIGMA * _NORMAL.inv_cdf(uniform)))
        return max(1, min_tokens, min(drawn, max_tokens))

    def token_id(self, seed: int, position: int, prompt_token_ids: Sequence[int]) -> int:
        """The answer's token at `position`, from 0."""
        if self.text == "echo":
            return prompt_token_ids[position % len(prompt_token_ids)]
        start, end = self.vocab_size // 4, max(self.vocab_size // 2, self.vocab_size // 4 + 1)
        return start + _mixed(seed ^ (position << 40)) % (end - start)


def _mixed(number: int) -> int:
    """SplitMix64's finalizer: 64 well-mixed bits (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
