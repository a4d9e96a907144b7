"""From one attempt's events to the sink. A token passes in the call that brings it, without a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from halfmoon.pb.types_pb2 import NOT_FINISHED, Token
from services.gateway.cluster.token_router import Event


class TokenSink(Protocol):
    """Where the tokens of an output go."""

    async def begin(self) -> None:
        """Comes before the first tokens, once in every attempt."""

    def push(self, tokens: Sequence[Token]) -> bool:
        """Takes tokens in order, at least one; True when no more are wanted."""


class NotifyingSink:
    """A sink that calls `on_begin` behind the first tokens of every attempt: the prompt's KV exists by then."""

    def __init__(self, sink: TokenSink, on_begin: Callable[[], None]) -> None:
        self._sink = sink
        self._on_begin = on_begin
        self.push = self._push_first

    async def begin(self) -> None:
        """Begins the sink."""
        self.push = self._push_first
        await self._sink.begin()

    def _push_first(self, tokens: Sequence[Token]) -> bool:
        """Notifies when the tokens are on their way: they do not wait for it."""
        wants_no_more = self._sink.push(tokens)
        self.push = self._sink.push  # which may have changed with its first tokens, too
        self._on_begin()
        return wants_no_more


class TokenFlow:
    """Owns the tokens of one attempt that are due while its sink has not begun, and how the attempt ends."""

    def __init__(self, handle: Callable[[Event], list[Token]]) -> None:
        """`handle` returns the tokens that are due after an event, or raises what ends the attempt."""
        self._handle = handle
        self._sink: TokenSink | None = None
        self._due: list[Token] = []
        self._is_complete: bool | None = None  # None: not ended, or failed
        self._failure: Exception | None = None
        self._stirred = asyncio.Event()  # a first token is due, or it has ended
        self._ended = asyncio.Event()

    def put(self, *events: Event) -> None:
        """Takes events that came together, whose tokens go on together. Events after the end are dropped."""
        if self._ended.is_set() or _is_last(self._due):
            return
        tokens: list[Token] = []
        try:
            for event in events:
                tokens += self._handle(event)
                if _is_last(tokens):
                    break
        except Exception as failure:
            self._take(tokens)
            self._fail(failure)
        else:
            self._take(tokens)

    async def run(self, sink: TokenSink) -> bool:
        """Returns True when the workers ended the output, False when the sink did. Raises what failed, after the
        tokens that were due."""
        await self._stirred.wait()
        if self._due:
            await sink.begin()
            self._sink, due, self._due = sink, self._due, []
            self._push(sink, due)
        await self._ended.wait()
        if self._is_complete is None:
            assert self._failure is not None
            raise self._failure
        return self._is_complete

    def _take(self, tokens: list[Token]) -> None:
        try:
            if tokens and self._sink is not None:
                self._push(self._sink, tokens)
            elif tokens:
                self._due += tokens
                self._stirred.set()
        except Exception as failure:
            self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        """Ends with what `run` raises, which the request waits for, unless it has ended."""
        if not self._ended.is_set():
            self._failure = failure
            self._end()

    def _push(self, sink: TokenSink, tokens: list[Token]) -> None:
        wants_no_more = sink.push(tokens)
        if wants_no_more or _is_last(tokens):
            self._is_complete = _is_last(tokens)
            self._end()

    def _end(self) -> None:
        self._stirred.set()
        self._ended.set()


def _is_last(tokens: Sequence[Token]) -> bool:
    return bool(tokens) and tokens[-1].finish_reason != NOT_FINISHED
