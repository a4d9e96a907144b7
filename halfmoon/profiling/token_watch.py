"""End times of a batch's steps, from a worker's token stream."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from halfmoon.errors import HalfmoonError
from halfmoon.pb import decode_pb2, types_pb2


class SeenStep(NamedTuple):
    """One decode step of the whole batch."""

    context_tokens: int  # of all its sequences, before the step
    seconds: float


class TokenWatch:
    """Owns what was read of one token stream. Knows nothing of RPCs."""

    def __init__(self, prompt_tokens: int) -> None:
        """`prompt_tokens`: of each sequence."""
        self._prompt_tokens = prompt_tokens
        self._last: tuple[float, dict[str, int]] = (0.0, {})  # arrival time; positions by request
        self._steps: list[SeenStep] = []
        self._batch: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._failure: HalfmoonError | None = None

    def begin(self, request_ids: Collection[str]) -> None:
        """Counts steps of exactly these requests from now on."""
        self._batch = frozenset(request_ids)
        self._steps.clear()

    def feed(self, message: decode_pb2.StepTokens, now_s: float) -> None:
        """Takes the next message. Raises HalfmoonError if the worker failed or ended a request early."""
        ended = [
            token for token in message.tokens if token.finish_reason not in (types_pb2.NOT_FINISHED, types_pb2.LENGTH)
        ]
        if ended:
            reason = types_pb2.FinishReason.Name(ended[0].finish_reason).lower()
            raise HalfmoonError(f"the worker ended a request of the profile: {reason}")
        positions = {token.request_id: token.position for token in message.tokens}  # the last one of each
        at_s, before = self._last
        self._last = now_s, positions
        if positions.keys() == self._batch == before.keys():
            nums = {position - before[name] for name, position in positions.items()}
            if len(nums) == 1:
                self._add(positions, nums.pop(), now_s - at_s)
        if any(token.request_id in self._batch and token.finish_reason for token in message.tokens):
            self.fail(HalfmoonError("a batch ended before enough of its steps were seen"))

    def _add(self, positions: Mapping[str, int], num_steps: int, seconds: float) -> None:
        """Adds the steps since the last message. A late reader sees several steps in one message."""
        last = sum(self._prompt_tokens + position for position in positions.values())
        for back in range(num_steps):
            self._steps.append(SeenStep(last - back * len(positions), seconds / num_steps))
        self._changed.set()

    def fail(self, error: HalfmoonError) -> None:
        """Ends the stream with an error."""
        self._failure = error
        self._changed.set()

    async def steps(self, num: int) -> Iterable[SeenStep]:
        """The next `num` steps of the whole batch. Raises the error that the stream ended with."""
        while len(self._steps) < num:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._steps[:num]
