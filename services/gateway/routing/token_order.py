"""Puts one request's tokens in order: they come on two streams, from the prefill and from the decode worker."""

from __future__ import annotations

from halfmoon.errors import HalfmoonError
from halfmoon.pb.types_pb2 import Token


class TokenOrder:
    """Owns the next due position and the tokens that came before the first one did."""

    def __init__(self, next_position: int) -> None:
        self._first = next_position
        self._next = next_position
        self._early: dict[int, Token] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the first due token has come."""
        return self._next > self._first

    def push(self, token: Token) -> list[Token]:
        """The tokens that are due now, in order. A repeated position is dropped.

        Decode tokens may overtake the first one, which is on another stream, and wait for it; after that, a skipped
        position is lost for good and raises HalfmoonError.
        """
        if token.position == self._next and not self._early:  # as nearly always
            self._next += 1
            return [token]
        if token.position < self._next:
            return []
        self._early.setdefault(token.position, token)
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        if self._early and self.has_begun:
            raise HalfmoonError(f"output token {self._next} was lost: position {min(self._early)} came after it")
        return due
