"""Reports of this worker's prefix cache to a gateway: a snapshot, then the changes, in numbered messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from weakref import WeakSet

from halfmoon.pb.gateway_pb2 import BlockEvents

_SHORT_KEY_BYTES = 8  # of each block key: the gateway's index stores no more
_MAX_KEYS = 100_000  # in one message


class CachedBlocks:
    """Owns the keys of the blocks in the prefix cache as of the last step. Event-loop thread only."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}
        self._feeds: WeakSet[BlockFeed] = WeakSet()  # of the registrations that there are

    def change(self, stored: Collection[bytes], evicted: Collection[bytes]) -> None:
        """Applies one step's changes."""
        if not (stored or evicted):  # most steps
            return
        gone = [key[:_SHORT_KEY_BYTES] for key in evicted]
        new = [key[:_SHORT_KEY_BYTES] for key in stored]
        for key in gone:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(new))
        for feed in self._feeds:
            feed.note(new, gone)

    def depth(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are cached."""
        return next((i for i, key in enumerate(keys) if key[:_SHORT_KEY_BYTES] not in self._keys), len(keys))

    def feed(self) -> BlockFeed:
        """Creates the feed of one more gateway."""
        made = BlockFeed(self._keys)
        self._feeds.add(made)
        return made


class BlockFeed:
    """Owns the changes not yet sent to one gateway. Call `begin_anew` before the first message of each registration."""

    def __init__(self, held: dict[bytes, None]) -> None:
        self._held = held
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._sequence = 0
        self._needs_snapshot = True

    def begin_anew(self) -> None:
        """Makes the next message a snapshot."""
        self._needs_snapshot = True
        self._stored.clear()
        self._evicted.clear()

    def note(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Records changes to report. A block evicted and stored again between two messages counts as unchanged."""
        if self._needs_snapshot:
            return
        for key in evicted:
            if key in self._stored:
                del self._stored[key]
            else:
                self._evicted[key] = None
        for key in stored:
            if key in self._evicted:
                del self._evicted[key]
            else:
                self._stored[key] = None

    def messages(self) -> Iterator[BlockEvents]:
        """Yields the changes since the last call; nothing if there are none."""
        is_snapshot, self._needs_snapshot = self._needs_snapshot, False
        stored, evicted = list(self._held if is_snapshot else self._stored), list(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        for start in range(0, max(len(stored), len(evicted), is_snapshot), _MAX_KEYS):
            self._sequence += 1
            yield BlockEvents(
                sequence=self._sequence,
                is_snapshot=is_snapshot and start == 0,
                stored=b"".join(stored[start : start + _MAX_KEYS]),
                evicted=b"".join(evicted[start : start + _MAX_KEYS]),
            )
