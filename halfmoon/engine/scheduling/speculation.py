"""Tokens that may come next, guessed from what a sequence said before (prompt lookup, Saxena 2023). No torch, clock.

A step computes the newest token and the guessed ones behind it, and draws after each of them as it would have drawn
without guesses: from the same logits, bit for bit, with the number that belongs to (seed, position). A guess counts if
it is what was drawn. That is rejection sampling for a guess of probability 1, accepted with the probability that the
model gives it (Leviathan et al., 2023), and it leaves the text as it is, greedy or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_DRAFTS = 15
_NGRAM = 3  # tokens that must have occurred before; with two, one guess in four of ordinary text is wrong more often
_ROW_SHARE = 0.3  # what a row adds to a step, of the time of a step without any: docs/log/engine.md
_PRIOR = 0.5  # acceptance that is assumed before anything was guessed
_MEMORY = 0.9  # how much of the older guesses' weight is left after each step with guesses
_FIRST_REST = 32  # tokens until a sequence whose guesses did not pay is tried again; then twice as many, and so on


class Speculation:
    """Owns what one sequence may repeat, and how many of its guesses were right. Knows nothing of steps."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> where the newest one but the last ends
        self._num_indexed = 0
        self._right, self._guessed = 2 * _PRIOR, 2.0
        self._rest, self._rests_until = _FIRST_REST, 0

    @property
    def acceptance(self) -> float:
        """The share of late guesses that were right."""
        return self._right / self._guessed

    def drafts(self, token_ids: Sequence[int], most: int, num_rows: int) -> list[int]:
        """At most `most` guesses after `token_ids`, in a step of `num_rows` other rows; none where they do not pay.

        A further guess pays if all before it and itself are right more often than the share of the step's time that
        its row takes, among rows that would each have given a token.
        """
        self._index(token_ids)
        if len(token_ids) < self._rests_until:
            return []
        if self.acceptance < _share(1):
            self._rests_until = len(token_ids) + self._rest
            self._rest *= 2
            self._right, self._guessed = _PRIOR, 2.0
            return []
        num_paying = int(math.log(_share(num_rows)) / math.log(min(self.acceptance, 0.999)))
        num_drafts = min(most, num_paying, MOST_DRAFTS)
        place = self._places.get(tuple(token_ids[-_NGRAM:]))
        return [] if place is None or num_drafts < 1 else list(token_ids[place : place + num_drafts])

    def note(self, num_drafts: int, num_right: int) -> None:
        """Notes the outcome of a step's guesses. Those behind the first wrong one were never put to the test."""
        tested = min(num_right + 1, num_drafts)
        self._right = self._right * _MEMORY + num_right
        self._guessed = self._guessed * _MEMORY + tested
        if num_right == num_drafts:
            self._rest = _FIRST_REST

    def _index(self, token_ids: Sequence[int]) -> None:
        """Learns all n-grams but the last one, whose continuation is what is sought."""
        for end in range(max(self._num_indexed, _NGRAM), len(token_ids)):
            self._places[tuple(token_ids[end - _NGRAM : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))


def _share(num_rows: int) -> float:
    """The time of one row among so many, of the time of their step."""
    return _ROW_SHARE * num_rows / (1 + _ROW_SHARE * num_rows)
