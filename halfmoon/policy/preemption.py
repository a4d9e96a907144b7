"""Who gives way on a worker that has too little room: the one rule of engine, simulator and forecasts. Pure.

A request is of one of two levels. By itself it has the level of its class, as in skip-join (FastServe, arXiv
2305.05920): it joins where it belongs instead of at the top. Pauses are bounded: an answer that was paused for as long
as its class allows rises above all classes, and stays there until it has run for as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar


class Pauses:
    """Owns one answer's pauses: since when, how long in all, and how much of its allowance is used up.

    The used part grows while the answer is paused and shrinks while it runs, at the same pace. When it reaches
    `max_pause_s`, the answer has *risen*, until nothing is used any more. So in any stretch of time it is paused for at
    most as long as it runs, and `max_pause_s` more, apart from what it waits for room when its turn has come.
    """

    __slots__ = (
        "_changed_s",
        "_has_risen",
        "_used_s",
        "class_priority",
        "count",
        "is_paused",
        "max_pause_s",
    )

    def __init__(self, class_priority: int = 0, max_pause_s: float = 0.0) -> None:
        """`class_priority`: smaller is higher. `max_pause_s`: 0 if the answer is never paused."""
        self.class_priority = class_priority
        self.max_pause_s = max_pause_s
        self.is_paused = False
        self.count = 0
        self._changed_s = 0.0  # when the latest pause began or ended
        self._used_s = 0.0  # of the allowance, as of then
        self._has_risen = False  # as of then

    def has_risen(self, now_s: float) -> bool:
        """Whether it goes before every class now."""
        if self.is_paused:
            return self._has_risen or self._used(now_s) >= self.max_pause_s
        return self._has_risen and self._used(now_s) > 0

    def gives_way_to(self, other: Pauses, now_s: float) -> bool:
        """Whether it is, or stays, paused for the other one."""
        return self.max_pause_s > 0 and self.class_priority > other.class_priority and not self.has_risen(now_s)

    def pause(self, now_s: float) -> None:
        """Begins a pause."""
        self._change(now_s, is_paused=True)
        self.count += 1

    def resume(self, now_s: float) -> float:
        """Ends a pause; returns how long it took."""
        seconds = now_s - self._changed_s
        self._change(now_s, is_paused=False)
        return seconds

    def _change(self, now_s: float, *, is_paused: bool) -> None:
        assert self.is_paused != is_paused, "a pause begins or ends twice"
        self._has_risen, self._used_s = self.has_risen(now_s), self._used(now_s)
        self._changed_s, self.is_paused = now_s, is_paused

    def _used(self, now_s: float) -> float:
        seconds = now_s - self._changed_s
        return self._used_s + seconds if self.is_paused else max(self._used_s - seconds, 0.0)


class Ranked(Protocol):
    """A request on a worker: a sequence of the engine, or a job of the simulator."""

    @property
    def rank(self) -> Any:
        """Unique, and comparable; smaller goes first."""

    @property
    def pauses(self) -> Pauses:
        """The class's level, and the pauses so far."""


Request = TypeVar("Request", bound=Ranked)


def in_turn(requests: Iterable[Request], now_s: float) -> list[Request]:
    """The requests in the order in which they get room: those that have risen first, then by rank."""
    return sorted(requests, key=lambda request: (not request.pauses.has_risen(now_s), request.rank))


def last_in_turn(requests: Iterable[Request], now_s: float) -> Request:
    """The request that loses its memory when another one's next token has none. There must be one."""
    return max(requests, key=lambda request: (not request.pauses.has_risen(now_s), request.rank))


def to_pause(
    running: Iterable[Request],
    newcomer: Pauses,
    num_places: int,
    num_blocks: int,
    blocks_of: Callable[[Request], int],
    now_s: float,
) -> list[Request] | None:
    """The decoding answers to pause so that a newcomer finds `num_places` and `num_blocks` that it lacks, last first.

    None if all that give way to it together have too few.
    """
    chosen: list[Request] = []
    for request in reversed(in_turn(running, now_s)):
        if num_places <= 0 and num_blocks <= 0:
            break
        if request.pauses.gives_way_to(newcomer, now_s):
            chosen.append(request)
            num_places -= 1
            num_blocks -= blocks_of(request)
    return chosen if num_places <= 0 and num_blocks <= 0 else None


def is_overtaken(newcomer: Pauses, ahead: Iterable[Pauses], now_s: float) -> bool:
    """Whether anybody who was here before, and lacks room, would be overtaken by the newcomer against the rule."""
    return any(not pauses.gives_way_to(newcomer, now_s) for pauses in ahead)


@dataclass(frozen=True, slots=True)
class Queued(Generic[Request]):
    """A request that needs room to begin or to go on, with all that it needs of it besides a place."""

    request: Request
    num_blocks: int
    num_tokens: int = 0  # of a prompt that waits; 0 for a paused answer


@dataclass(slots=True)
class Turns(Generic[Request]):
    """What happens before a step, in this order."""

    pause: list[Request] = field(default_factory=list)
    get_room: list[Request] = field(default_factory=list)  # paused answers that go on, prompts that others pause for
    bars: bool = False  # nobody behind `passed` gets room in this step
    passed: set[Any] = field(default_factory=set)  # ranks of those whose turn came

    def is_barred(self, request: Request) -> bool:
        """Whether its turn has not come."""
        return self.bars and request.rank not in self.passed


def take_turns(
    queue: Sequence[Queued[Request]],
    running: Sequence[Request],
    num_places: int,
    num_blocks: int,
    num_tokens: int,
    blocks_of: Callable[[Request], int],
    now_s: float,
) -> Turns[Request]:
    """Who gets room before a step. The first in `queue` that finds none is waited for: nobody behind gets any.

    `queue` is in turn, `running` are the decoding answers. `num_blocks` counts those of paused answers as free, which
    may be moved out; `num_tokens` is what the step has left for prompts: answers are paused for no prompt that would
    only wait for its turn.
    """
    turns: Turns[Request] = Turns()
    for item in queue:
        needs_place, lacking = int(num_places < 1), item.num_blocks - num_blocks
        if needs_place or lacking > 0:
            chosen = None
            if item.num_tokens and num_tokens > 0:
                candidates = [one for one in running if one not in turns.pause]
                chosen = to_pause(candidates, item.request.pauses, needs_place, lacking, blocks_of, now_s)
            if chosen is None:
                turns.bars = True
                return turns
            turns.pause += chosen
            num_places += len(chosen)
            num_blocks += sum(map(blocks_of, chosen))
            turns.get_room.append(item.request)
        elif not item.num_tokens:
            turns.get_room.append(item.request)
        turns.passed.add(item.request.rank)
        num_places -= 1
        num_blocks -= item.num_blocks
        num_tokens -= item.num_tokens
    return turns
