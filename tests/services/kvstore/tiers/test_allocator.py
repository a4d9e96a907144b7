"""No two rooms overlap, nothing leaks, and freed neighbours become one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.kvstore.tiers.allocator import ALIGNMENT_BYTES, Allocator, rounded_bytes
from services.kvstore.tiers.arena import Arena, Room

CAPACITY = 40 * ALIGNMENT_BYTES


class AllocatorMachine(RuleBasedStateMachine):
    """Rooms are filled with their own number: an overlap would show as a foreign one."""

    rooms = Bundle("rooms")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(memoryview(bytearray(CAPACITY + 7)))
        self.live: dict[int, Room] = {}
        self.next = 1

    @rule(target=rooms, num_bytes=st.integers(0, 12 * ALIGNMENT_BYTES))
    def allocate(self, num_bytes: int) -> int:
        room = self.arena.allocate(num_bytes)
        number = self.next
        if room is not None:
            room.view[:] = bytes([number % 256]) * num_bytes
            self.live[number] = room
            assert room.view.nbytes == num_bytes
            assert room.offset % ALIGNMENT_BYTES == 0
        self.next += 1
        return number

    @rule(number=rooms)
    def retain(self, number: int) -> None:
        if number in self.live:
            self.arena.retain(self.live[number])
            self.arena.release(self.live[number])

    @rule(number=consumes(rooms))
    def release(self, number: int) -> None:
        if number in self.live:
            self.arena.release(self.live.pop(number))

    @invariant()
    def every_room_holds_what_was_put_there(self) -> None:
        self.arena.check_integrity()
        for number, room in self.live.items():
            assert bytes(room.view) == bytes([number % 256]) * room.view.nbytes
        used = sum(rounded_bytes(room.view.nbytes) for room in self.live.values())
        assert self.arena.free_bytes == CAPACITY - used

    def teardown(self) -> None:
        for room in self.live.values():
            self.arena.release(room)
        assert self.arena.free_bytes == CAPACITY
        everything = self.arena.allocate(CAPACITY)
        assert everything is not None, "all of it is one run again"


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAllocator = AllocatorMachine.TestCase


def test_the_smallest_run_that_fits_is_taken() -> None:
    allocator = Allocator(10 * ALIGNMENT_BYTES)
    places = [allocator.allocate(size * ALIGNMENT_BYTES) for size in (3, 1, 2, 1, 3)]
    for freed in (0, 2):
        offset = places[freed]
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(2 * ALIGNMENT_BYTES) == places[2]
    assert allocator.allocate(4 * ALIGNMENT_BYTES) is None
    assert allocator.allocate(3 * ALIGNMENT_BYTES) == places[0]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_what_is_full_says_so_and_recovers(sizes: list[int]) -> None:
    allocator = Allocator(1024)
    got = [offset for size in sizes if (offset := allocator.allocate(size)) is not None]
    for offset in got:
        allocator.free(offset)
    allocator.check_integrity()
    assert allocator.allocate(1024) == 0
