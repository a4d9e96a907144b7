"""Room on a decode worker where classes may be paused: who gives way to a newcomer, and how long it waits itself.

The rule is `policy/preemption.py`; this is what follows from it for predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.preemption import Pauses, to_pause
from halfmoon.policy.values import DecodeLoad, DecodeLoads

_LEAST = 1e-9  # a divisor above 0


class Room(NamedTuple):
    """What a worker has room for."""

    places: float  # sequences; inf if unknown
    tokens: float


class Rooms(NamedTuple):
    """The same of every row [num_rows]."""

    places: Floats
    tokens: Floats

    def of(self, row: int) -> Room:
        """That of one row."""
        return Room(float(self.places[row]), float(self.tokens[row]))


@dataclass(frozen=True, slots=True)
class Decoding:
    """An answer as the rule of pauses sees it."""

    slot: int
    pauses: Pauses
    joins_s: float
    context_tokens: float  # mean over its life

    @property
    def rank(self) -> tuple[int, float, int]:
        """By class, then by arrival."""
        return self.pauses.class_priority, self.joins_s, self.slot


class Before(NamedTuple):
    """The requests on one worker that a newcomer would not pause, as arrays [num_requests]."""

    joins_s: Floats
    ends_s: Floats
    context_tokens: Floats  # mean over the life of each
    usual: Callable[[float], DecodeLoad]  # mean load over so many seconds of higher classes that join in that time


def beside(loads: DecodeLoads, giving_way: DecodeLoads, rooms: Rooms, num_tokens: float) -> DecodeLoads:
    """The loads [num_rows] in the steps of a newcomer of `num_tokens`: those that give way are paused where it lacks
    room, as many as that takes.
    """
    share = np.maximum(
        (loads.batch + 1 - rooms.places) / np.maximum(giving_way.batch, _LEAST),
        (loads.context_tokens + num_tokens - rooms.tokens) / np.maximum(giving_way.context_tokens, _LEAST),
    )
    np.clip(share, 0.0, 1.0, out=share)
    return DecodeLoads(loads.batch - share * giving_way.batch, loads.context_tokens - share * giving_way.context_tokens)


def paused_for(newcomer: Decoding, others: Sequence[Decoding], room: Room, now_s: float) -> list[Decoding]:
    """The answers that are paused when the newcomer joins them."""
    num_places = len(others) + 1 - room.places
    num_tokens = sum(one.context_tokens for one in (newcomer, *others)) - room.tokens
    if num_places <= 0 and num_tokens <= 0:
        return []
    lacking = math.ceil(max(num_places, 0)), math.ceil(max(num_tokens, 0))
    return to_pause(others, newcomer.pauses, *lacking, lambda one: math.floor(one.context_tokens), now_s) or []


def room_s(before: Before, room: Room, num_tokens: float, now_s: float) -> float:
    """Seconds until a newcomer of `num_tokens` that pauses nobody has room; 0 if it has some now."""
    order = np.argsort(before.ends_s)
    left = np.arange(len(order), -1, -1)  # [num_requests + 1], after each end
    tokens = np.append(before.context_tokens[order][::-1].cumsum()[::-1], 0.0)
    fits = (left + 1 <= room.places) & (tokens + num_tokens <= room.tokens)
    fits[-1] = True  # else no worker of its kind would have it
    first = int(np.argmax(fits))
    return max(float(before.ends_s[order[first - 1]]) - now_s, 0.0) if first else 0.0


def paused_s(
    before: Before, room: Room, num_tokens: float, begins_s: float, decodes_s: float, max_pause_s: float
) -> float:
    """Seconds that an answer which decodes for `decodes_s` is paused for higher classes, in the mean.

    At most as long as it decodes and `max_pause_s` (`Pauses`).
    """
    if decodes_s <= 0:
        return 0.0
    ends_s = begins_s + decodes_s
    there_s = np.minimum(before.ends_s, ends_s) - np.maximum(before.joins_s, begins_s)
    shares = np.maximum(there_s, 0.0) / decodes_s
    usual = before.usual(decodes_s)
    num_before = float(np.add.reduce(shares)) + usual.batch
    tokens_before = float(shares @ before.context_tokens) + usual.context_tokens
    lacking = max(num_before + 1 - room.places, (tokens_before + num_tokens - room.tokens) / max(num_tokens, 1.0))
    most_s = decodes_s + max_pause_s
    if lacking >= 1:
        return most_s
    return min(max(lacking, 0.0) / (1 - lacking) * decodes_s, most_s) if lacking > 0 else 0.0
