"""How much KV memory a modelled worker has left, and which prefixes lie in it. Blocks are counted, not numbered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from halfmoon.errors import NoCapacity


class PrefixChanges(NamedTuple):
    """Keys that are known now and were not before, and the other way round."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


class PrefixBlocks:
    """Owns the count of private blocks, the users of each known one, and the order in which unused ones are evicted.

    A block is private to one sequence, or known by its key: then any number of sequences share it, and without users it
    is idle: still found, and evicted (least recently used) when private blocks are wanted.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_private = 0
        self._users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._stored: dict[bytes, None] = {}  # since the changes were taken last
        self._evicted: dict[bytes, None] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free ones and idle ones."""
        return self.num_blocks - self._num_private - len(self._users) + len(self._idle)

    @property
    def num_known(self) -> int:
        """Blocks that hold a known prefix."""
        return len(self._users)

    def share(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are known; those get one user more."""
        users = self._users
        for index, key in enumerate(keys):
            if key not in users:
                return index
            users[key] += 1
            self._idle.pop(key, None)
        return len(keys)

    def take(self, num_blocks: int) -> None:
        """Private blocks, evicting as needed. Raises NoCapacity, and changes nothing, when fewer are available."""
        if num_blocks > self.num_available:
            raise NoCapacity(f"{num_blocks} blocks are wanted, {self.num_available} are available")
        for _ in range(num_blocks - (self.num_blocks - self._num_private - len(self._users))):
            key, _ = self._idle.popitem(last=False)
            del self._users[key]
            _note(key, self._evicted, self._stored)
        self._num_private += num_blocks

    def name(self, key: bytes) -> bool:
        """A private block is known as `key` from now on, its owner a user. False: another one is, it stays private."""
        if key in self._users:
            return False
        self._num_private -= 1
        self._users[key] = 1
        _note(key, self._stored, self._evicted)
        return True

    def release(self, num_private: int, shared: Iterable[bytes]) -> None:
        """A sequence gives back what it has; `shared` in the order of the prompt, whose end is evicted first."""
        self._num_private -= num_private
        for key in reversed(tuple(shared)):
            self._users[key] -= 1
            if not self._users[key]:
                self._idle[key] = None

    def take_changes(self) -> PrefixChanges:
        """What changed since the last call; a block that went and came back did not."""
        changes = PrefixChanges(tuple(self._stored), tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return changes


def _note(key: bytes, done: dict[bytes, None], undone: dict[bytes, None]) -> None:
    if key in undone:
        del undone[key]
    else:
        done[key] = None
