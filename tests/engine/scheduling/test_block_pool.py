"""Nothing leaks, is freed twice, or is handed out while somebody holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.errors import NoCapacity

NUM_BLOCKS = 20


class PoolMachine(RuleBasedStateMachine):
    """Holders come, grow, share and go; the model is a plain count of references."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.references: dict[int, int] = {}

    def take(self, count: int, near: int | None, room: int) -> list[int]:
        if count > NUM_BLOCKS - len(self.references):
            with pytest.raises(NoCapacity):
                self.pool.allocate(count, near, room)
            return []
        blocks = self.pool.allocate(count, near, room)
        assert len(blocks) == len(set(blocks)) == count
        assert not set(blocks) & self.references.keys()
        self.references |= dict.fromkeys(blocks, 1)
        return blocks

    @rule(target=holders, count=st.integers(0, 8), room=st.integers(0, 6))
    def allocate(self, count: int, room: int) -> list[int]:
        return self.take(count, None, room)

    @rule(target=holders, holder=consumes(holders), count=st.integers(1, 3), room=st.integers(0, 3))
    def grow(self, holder: list[int], count: int, room: int) -> list[int]:
        return holder + self.take(count, holder[-1] if holder else None, room)

    @rule(target=holders, holder=holders)
    def share(self, holder: list[int]) -> list[int]:
        self.pool.share(holder)
        for block in holder:
            self.references[block] += 1
        return list(holder)

    @rule(holder=consumes(holders))
    def release(self, holder: list[int]) -> None:
        self.pool.release(holder)
        for block in holder:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS - len(self.references)
        assert all(self.pool.references(block) == count for block, count in self.references.items())


TestPool = PoolMachine.TestCase

NUM_DIVISIBLE = 12


class DivisibleMachine(RuleBasedStateMachine):
    """Holders come, halve blocks or make them whole, and go; the model counts halves, and knows who has which."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, NUM_DIVISIBLE)
        self.is_half: dict[int, bool] = {}

    @rule(target=holders, count=st.integers(0, 8), room=st.integers(0, 6))
    def allocate(self, count: int, room: int) -> list[int]:
        if count > self.pool.num_free:
            with pytest.raises(NoCapacity):
                self.pool.allocate(count, room=room)
            return []
        blocks = self.pool.allocate(count, room=room)
        assert not set(blocks) & self.is_half.keys()
        self.is_half |= dict.fromkeys(blocks, False)
        return blocks

    @rule(holder=consumes(holders))
    def release(self, holder: list[int]) -> None:
        self.pool.release(holder)
        for block in holder:
            del self.is_half[block]

    @rule(holder=holders, data=st.data())
    def halve(self, holder: list[int], data: st.DataObject) -> None:
        first = NUM_BLOCKS - NUM_DIVISIBLE
        whole = [block for block in holder if block >= first and not self.is_half[block]]
        for block in data.draw(st.lists(st.sampled_from(whole), unique=True)) if whole else []:
            self.pool.halve(block)
            self.is_half[block] = True

    @rule(holder=holders)
    def make_whole(self, holder: list[int]) -> None:
        for block in [block for block in holder if self.is_half[block]]:
            self.is_half[block] = not self.pool.make_whole(block)
            if self.is_half[block]:
                assert self.free_halves() == 0

    def free_halves(self) -> int:
        used = [half for block, half in self.is_half.items() if block >= NUM_BLOCKS - NUM_DIVISIBLE]
        return 2 * NUM_DIVISIBLE - 2 * len(used) + sum(used)

    @invariant()
    def no_half_is_lost_or_used_twice(self) -> None:
        self.pool.check_integrity()
        first = NUM_BLOCKS - NUM_DIVISIBLE
        num_plain = first - sum(block < first for block in self.is_half)
        assert self.pool.num_free == num_plain + self.free_halves() // 2
        num_halves = sum(self.is_half.values())
        assert self.pool.num_free_with(len(self.is_half) - num_halves, num_halves) == NUM_BLOCKS
        assert all(self.pool.is_half(block) == is_half for block, is_half in self.is_half.items())
        used = [block for block in self.is_half if block >= first]
        seconds: list[int] = self.pool.seconds(used).tolist() if used else []
        assert [second < 0 for second in seconds] == [self.is_half[block] for block in used]
        halves = used + [second for second in seconds if second >= 0]
        assert len(np.unique(halves)) == len(halves)


TestDivisible = DivisibleMachine.TestCase


def test_a_sequence_grows_in_place_beside_others() -> None:
    pool = BlockPool(32)
    one = pool.allocate(3, room=2)
    two = pool.allocate(3, room=2)
    for _ in range(2):
        one += pool.allocate(1, near=one[-1])
        two += pool.allocate(1, near=two[-1])
    assert one == list(range(one[0], one[0] + 5))
    assert two == list(range(two[0], two[0] + 5))


def test_the_best_fitting_hole_is_filled_first() -> None:
    pool = BlockPool(16)
    first, _, third, _ = (pool.allocate(n) for n in (4, 1, 2, 1))
    pool.release(first)
    pool.release(third)
    assert pool.allocate(2) == third
    assert pool.allocate(4) == first


def test_claimed_blocks_are_taken_when_nothing_else_is_left() -> None:
    pool = BlockPool(8)
    pool.allocate(2, room=6)
    assert sorted(pool.allocate(6)) == [2, 3, 4, 5, 6, 7]
    pool.check_integrity()


def test_a_claim_ends_with_its_sequence() -> None:
    pool = BlockPool(8)
    one = pool.allocate(1, room=7)
    pool.release(one)
    assert pool.allocate(8) == list(range(8))


def test_it_knows_what_was_never_used() -> None:
    pool = BlockPool(NUM_BLOCKS)
    assert pool.num_ever_used == 0
    pool.release(pool.allocate(3, room=12))
    assert pool.num_ever_used == 3, "what was claimed and not used counts as never used"
    pool.allocate(NUM_BLOCKS)
    assert pool.num_ever_used == NUM_BLOCKS


def test_freeing_twice_is_our_bug() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(blocks)


def test_too_many_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(NoCapacity, match="5 blocks are wanted, 4 of 4 are free"):
        pool.allocate(5)
    assert pool.num_free == 4
