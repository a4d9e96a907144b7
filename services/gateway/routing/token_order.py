"""The order of one output's tokens, and what each of them means for it."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.errors import ConstraintFailed, HalfmoonError, Unavailable
from halfmoon.pb.types_pb2 import CANCELLED, CONSTRAINT_FAILED, ERROR, NOT_FINISHED, TAKEN_OVER, Token
from services.gateway.cluster.token_router import TakenOver
from services.gateway.request import RequestOutput


class TokenOrder:
    """Orders the tokens of one output, which come on two streams: from the prefill and from the decode worker.

    Owns the next due position and the tokens that came before the first one.
    """

    def __init__(self, next_position: int) -> None:
        self._first = next_position
        self._next = next_position
        self._early: dict[int, Token] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the first due token has come."""
        return self._next > self._first

    @property
    def has_last(self) -> bool:
        """Whether the last token is among those that wait for the first one."""
        return any(token.finish_reason != NOT_FINISHED for token in self._early.values())

    def push(self, token: Token) -> list[Token]:
        """Returns the tokens that are due now, in order. Drops a repeated position.

        Decode tokens may overtake the first one, which is on another stream, and wait for it. After the first one, a
        skipped position is lost for good and raises HalfmoonError.
        """
        if token.position == self._next and not self._early:  # the usual case
            self._next += 1
            return [token]
        return self.push_together([token])

    def push_together(self, tokens: Sequence[Token]) -> list[Token]:
        """Likewise, of tokens that come at once: a position that is skipped may be among those that came early."""
        for token in tokens:
            if token.position >= self._next:
                self._early.setdefault(token.position, token)
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        if self._early and self.has_begun:
            raise HalfmoonError(f"output token {self._next} was lost: position {min(self._early)} came after it")
        return due


def accepted(order: TokenOrder, output: RequestOutput, token: Token, at_s: float) -> list[Token]:
    """The tokens that are due with this one, noted. Raises what ends the attempt instead."""
    if token.finish_reason == CANCELLED:
        raise Unavailable("a worker gave the request up")
    if token.finish_reason == CONSTRAINT_FAILED:
        raise ConstraintFailed
    if token.finish_reason == ERROR:
        raise HalfmoonError("a worker failed while computing the request")
    if token.finish_reason == TAKEN_OVER:
        if output.repeat is not None:
            output.repeat.request.is_taken_over = True
        raise TakenOver
    due = order.push(token)
    output.progress.note_tokens([token.token_id for token in due], at_s)
    output.progress.note_drafts(due)
    if output.repeat is not None:
        output.repeat.tokens.extend(due)
    return due
