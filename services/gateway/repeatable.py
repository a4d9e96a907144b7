"""A request that has an id of its client: a repeat of it goes on where it was, on any gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from halfmoon.pb.types_pb2 import Repeatable, Token
from services.gateway.cluster.held_answers import HeldAnswer, newest
from services.gateway.cluster.token_router import Event, Stopping, TakenOver, TokenRouter
from services.gateway.http.request_ids import ReusedKey, digest

_SEED_BITS = 63


@dataclass(slots=True, eq=False)
class RepeatableRequest:
    """What one HTTP request and its repeats have in common, and what workers hold of it.

    Owns the routes of its running attempts, to end them when a repeat takes the answer over.
    """

    key: bytes
    body_digest: bytes
    created_at: int  # Unix seconds: those of the first request, once found
    last_event_id: str | None = None  # the client has a stream's events up to this one
    held: dict[int, HeldAnswer] = field(default_factory=dict)  # by output
    is_taken_over: bool = False
    _routes: list[Callable[[Event], None]] = field(default_factory=list)

    @property
    def seed(self) -> int:
        """The seed if the client gives none: a repeat whose answer is lost computes the same one."""
        return int.from_bytes(self.key[:4] + self.body_digest[:4], "little") & ((1 << _SEED_BITS) - 1)

    def call_id(self, choice: int, number: int) -> str:
        """The id of a tool call, the same in every repeat."""
        return f"call_{digest(self.key.hex(), self.body_digest.hex(), str(choice), str(number)).hex()[:24]}"

    def hold(self, answers: Sequence[HeldAnswer]) -> None:
        """Takes what the workers hold under this key. Raises ReusedKey if it answers another body."""
        if any(answer.repeatable.body_digest != self.body_digest for answer in answers):
            raise ReusedKey
        self.held = newest(answers)
        self.created_at = min([self.created_at, *(answer.repeatable.created_at for answer in answers)])

    def is_recorded(self, num_outputs: int) -> bool:
        """Whether the whole answer was held, and is in the ledger."""
        return 0 < len(self.held) == num_outputs and all(held.is_settled for held in self.held.values())

    @contextmanager
    def routed(self, put: Callable[[Event], None]) -> Iterator[None]:
        """Inside the block, an attempt takes events by `put`."""
        self._routes.append(put)
        try:
            yield
        finally:
            self._routes.remove(put)

    def take_over(self) -> bool:
        """Ends the running attempts and leaves them to a repeat, on their workers. False if none is running."""
        self.is_taken_over = True
        for put in list(self._routes):
            put(Stopping(TakenOver()))
        return bool(self._routes)


@dataclass(slots=True, eq=False)
class RepeatableOutput:
    """Owns the tokens so far of one output, for the worker of its next attempt."""

    request: RepeatableRequest
    index: int
    tokens: list[Token] = field(default_factory=list)
    num_attempts: int = 0

    @property
    def held(self) -> HeldAnswer | None:
        """What a worker holds of it."""
        return self.request.held.get(self.index)

    def is_left(self, router: TokenRouter) -> bool:
        """Whether the output goes on without this gateway, for a repeat."""
        return self.request.is_taken_over or router.is_stopping

    def adopt(self, held: HeldAnswer) -> None:
        """Counts the attempts up to the one that is held."""
        self.num_attempts = held.repeatable.attempt + 1

    def next_attempt(self, cached_tokens: int) -> Repeatable:
        """What the worker of the next attempt keeps."""
        self.num_attempts += 1
        return Repeatable(
            key=self.request.key,
            body_digest=self.request.body_digest,
            index=self.index,
            attempt=self.num_attempts - 1,
            created_at=self.request.created_at,
            cached_tokens=cached_tokens,
            tokens=self.tokens,
        )
