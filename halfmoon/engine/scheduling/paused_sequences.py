"""Answers that give way to higher classes: which ones, and whether their K and V are still in blocks. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.policy.preemption import last_in_turn


class PausedKV(Protocol):
    """Where K and V go whose blocks others need."""

    def save(self, sequence: Sequence) -> bool:
        """Copies what is computed out of the sequence's blocks; False if there is no room for it."""

    def load(self, sequence: Sequence) -> None:
        """Copies it back into the sequence's new blocks, and forgets the copy."""

    def forget(self, sequence: Sequence) -> None:
        """Drops the copy, if there is one."""


class NoKV:
    """Of workers whose K and V are only counted."""

    def save(self, sequence: Sequence) -> bool:
        """Does nothing; there is always room."""
        return True

    def load(self, sequence: Sequence) -> None:
        """Does nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Does nothing."""


class PauseCounts:
    """Owns what is reported of pauses."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_moved_out = 0  # whose blocks others needed
        self.total_s = 0.0  # of those that ended

    def take(self) -> tuple[int, int, float]:
        """Pauses begun, moved out, and the seconds of those ended, since the last call."""
        counts = self.num_begun, self.num_moved_out, self.total_s
        self.num_begun, self.num_moved_out, self.total_s = 0, 0, 0.0
        return counts


class PausedSequences:
    """Owns the paused sequences. They keep their blocks while nobody else needs them, their place not."""

    def __init__(self, cache: PrefixCache, kv: PausedKV | None = None) -> None:
        self.counts = PauseCounts()
        self._cache = cache
        self._kv = kv or NoKV()
        self._sequences: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Begins a sequence's pause."""
        sequence.pauses.pause(now_s)
        sequence.state = "paused"
        self._sequences.append(sequence)
        self.counts.num_begun += 1

    def take_out(self, sequence: Sequence) -> None:
        """Forgets a sequence; what it has in blocks stays there."""
        self._sequences.remove(sequence)
        self._kv.forget(sequence)

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Ends a sequence's pause. If it was moved out, its new blocks are filled."""
        if sequence.is_moved_out:
            self._kv.load(sequence)
            sequence.is_moved_out = False
        self._sequences.remove(sequence)
        self.counts.total_s += sequence.pauses.resume(now_s)

    def reclaimable(self) -> set[int]:
        """The blocks that would be available if all paused sequences were moved out."""
        uses = Counter(block for sequence in self._sequences for block in sequence.kept_blocks)
        return {block for block, num in uses.items() if self._cache.num_users(block) == num}

    def last_in_blocks(self, now_s: float) -> Sequence | None:
        """The one that is moved out first."""
        kept = [sequence for sequence in self._sequences if not sequence.is_moved_out]
        return last_in_turn(kept, now_s) if kept else None

    def save(self, sequence: Sequence) -> bool:
        """Copies what a sequence has in its blocks, which may then be released; False if there is no room."""
        if not self._kv.save(sequence):
            return False
        sequence.is_moved_out = True
        self.counts.num_moved_out += 1
        return True
