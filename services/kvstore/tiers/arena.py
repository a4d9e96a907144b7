"""Rooms in one preallocated piece of memory, counted by their users."""

from __future__ import annotations

from dataclasses import dataclass

from services.kvstore.tiers.allocator import Allocator


@dataclass(slots=True, eq=False)
class Room:
    """A part of the arena. Its memory stays as it is until the last of its users has released it."""

    offset: int
    view: memoryview  # exactly as many bytes as were asked for
    num_users: int = 1


class Arena:
    """Owns the memory and who uses which part of it. Knows nothing of blocks."""

    def __init__(self, memory: memoryview) -> None:
        """memory: writable bytes, perhaps shared with other processes."""
        self._memory = memory
        self._allocator = Allocator(memory.nbytes)
        self.capacity_bytes = self._allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes without a user, in however many pieces."""
        return self._allocator.free_bytes

    def allocate(self, num_bytes: int) -> Room | None:
        """A room with one user; None if there is no free run as long."""
        offset = self._allocator.allocate(num_bytes)
        return None if offset is None else Room(offset, self._memory[offset : offset + num_bytes])

    def retain(self, room: Room) -> None:
        """One more user."""
        assert room.num_users > 0, "the room was given back"
        room.num_users += 1

    def release(self, room: Room) -> None:
        """One user less; after the last the memory is free."""
        assert room.num_users > 0, "released once too often"
        room.num_users -= 1
        if room.num_users == 0:
            self._allocator.free(room.offset)

    def check_integrity(self) -> None:
        """For tests."""
        self._allocator.check_integrity()
