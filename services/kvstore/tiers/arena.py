"""Rooms in one preallocated piece of memory, with counted users."""

from __future__ import annotations

from dataclasses import dataclass

from services.kvstore.tiers.allocator import Allocator


@dataclass(slots=True, eq=False)
class Room:
    """A part of the arena. Its memory is not reused until its last user has released it."""

    offset: int
    view: memoryview  # exactly as many bytes as requested
    num_users: int = 1


class Arena:
    """Owns the memory and which parts are in use. Knows nothing of blocks."""

    def __init__(self, memory: memoryview) -> None:
        """memory: writable bytes, possibly shared with other processes."""
        self._memory = memory
        self._allocator = Allocator(memory.nbytes)
        self.capacity_bytes = self._allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not in use, in any number of pieces."""
        return self._allocator.free_bytes

    def allocate(self, num_bytes: int) -> Room | None:
        """Allocates a room with one user; None if no free run is long enough."""
        offset = self._allocator.allocate(num_bytes)
        return None if offset is None else Room(offset, self._memory[offset : offset + num_bytes])

    def retain(self, room: Room) -> None:
        """Adds a user."""
        assert room.num_users > 0, "the room was given back"
        room.num_users += 1

    def release(self, room: Room) -> None:
        """Removes a user; after the last one the memory is free."""
        assert room.num_users > 0, "released once too often"
        room.num_users -= 1
        if room.num_users == 0:
            self._allocator.free(room.offset)

    def check_integrity(self) -> None:
        """Asserts the allocator's invariants. For tests."""
        self._allocator.check_integrity()
