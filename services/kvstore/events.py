"""Numbered events of blocks, without gaps, for readers that must not slow the store down. No I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from halfmoon.catalog.entry import Tier

EventKind = Literal["stored", "moved", "evicted"]
MAX_BEHIND = 10_000  # events queued for one reader; beyond it the reader gets a snapshot instead


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change. `tiers` are those that hold the block afterwards; empty if it was evicted."""

    sequence: int  # from 1; a snapshot has the number of the last event it contains
    kind: EventKind
    block: bytes
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks held as of `sequence`."""

    sequence: int
    blocks: list[tuple[bytes, tuple[Tier, ...]]]


class EventLog:
    """Owns the numbering and the readers' queues. `state` lists all blocks held now."""

    def __init__(self, state: Callable[[], Iterable[tuple[bytes, tuple[Tier, ...]]]]) -> None:
        self._state = state
        self._readers: set[EventReader] = set()
        self.sequence = 0

    def publish(self, kind: EventKind, block: bytes, tiers: tuple[Tier, ...]) -> None:
        """Numbers one event and queues it for every reader."""
        self.sequence += 1
        event = BlockEvent(self.sequence, kind, block, tiers)
        for reader in self._readers:
            reader.push(event)

    def subscribe(self) -> EventReader:
        """Creates a reader whose first item is a snapshot. Its owner closes it."""
        reader = EventReader(self)
        self._readers.add(reader)
        return reader

    def snapshot(self) -> Snapshot:
        """Takes a snapshot."""
        return Snapshot(self.sequence, list(self._state()))

    def leave(self, reader: EventReader) -> None:
        """Removes a reader."""
        self._readers.discard(reader)


class EventReader:
    """Owns the events that one subscriber has not read yet."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._events: deque[BlockEvent] = deque()
        self._needs_snapshot = True
        self._has_some = asyncio.Event()
        self._has_some.set()

    def push(self, event: BlockEvent) -> None:
        """Queues an event. Too many are replaced by a snapshot, taken when the reader asks."""
        if self._needs_snapshot:
            return
        self._events.append(event)
        if len(self._events) > MAX_BEHIND:
            self._events.clear()
            self._needs_snapshot = True
        self._has_some.set()

    async def next(self) -> Snapshot | list[BlockEvent]:
        """Waits for and returns what is new."""
        await self._has_some.wait()
        self._has_some.clear()
        if self._needs_snapshot:
            self._needs_snapshot = False
            return self._log.snapshot()
        events, self._events = list(self._events), deque()
        return events

    def close(self) -> None:
        """Ends the subscription."""
        self._log.leave(self)
