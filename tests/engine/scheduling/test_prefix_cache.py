"""A cached prefix is found exactly, shared without copies, and evicted only when nobody uses it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling import prefix_cache
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import Beginning, PrefixCache
from halfmoon.engine.scheduling.sequence import Sequence

BLOCK_TOKENS = 2
NUM_BLOCKS = 12
SIZE = 3  # tokens of a block in `CacheMachine`


def sequence_of(token_ids: list[int]) -> Sequence:
    return Sequence(EngineRequest("r", tuple(token_ids), SamplingParams(max_tokens=1)), 0)


def computed(cache: PrefixCache, token_ids: list[int]) -> Sequence:
    """A sequence that matched, got the rest of its blocks, and ran."""
    sequence = sequence_of(token_ids)
    matched = cache.match(sequence, len(token_ids) - 1)
    sequence.num_known_blocks = len(matched)
    sequence.blocks = matched + cache.allocate(-(-len(token_ids) // BLOCK_TOKENS) - len(matched))
    sequence.num_computed = len(token_ids)
    cache.insert(sequence)
    return sequence


class CacheMachine(RuleBasedStateMachine):
    """The model: what each block holds, written when its sequence ran, must be what a match promises."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(BlockPool(NUM_BLOCKS), SIZE, lambda salt: b"root" + salt)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.in_use: list[int] = []
        self.told: set[bytes] = set()  # by the changes
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(prefix_cache, "_MOST_COMPARED", 2)  # there are often more

    def teardown(self) -> None:
        self.patches.undo()

    @rule(
        target=running,
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        leaves_one=st.booleans(),
        copies=st.booleans(),
    )
    def run(self, token_ids: list[int], leaves_one: bool, copies: bool) -> Sequence | None:
        if -(-len(token_ids) // SIZE) > self.cache.num_available:
            return None
        sequence = sequence_of(token_ids)
        num_known = len(token_ids) - leaves_one
        matched = self.cache.match(sequence, num_known)
        assert len(matched) * SIZE <= num_known
        for index, block in enumerate(matched):
            assert self.content[block] == tuple(token_ids[: (index + 1) * SIZE])
        sequence.num_known_blocks = len(matched)
        begun = self.cache.beginning(sequence, len(matched), num_known)
        if begun is not None:
            known = tuple(token_ids[: len(matched) * SIZE + begun.num_tokens])
            assert self.content[begun.block][: len(known)] == known
            assert len(matched) * SIZE < len(known) <= num_known
            if self.cache.give(begun, whole_only=copies):
                assert begun.block not in self.in_use
                assert not copies or self.content[begun.block] == known
                matched.append(begun.block)
            else:
                self.cache.release([begun.block])
        fresh = self.cache.allocate(-(-len(token_ids) // SIZE) - len(matched))
        assert not set(fresh) & set(self.in_use)
        sequence.blocks = matched + fresh
        self.in_use += sequence.blocks
        for index, block in enumerate(sequence.blocks[sequence.num_known_blocks :], sequence.num_known_blocks):
            self.content[block] = tuple(token_ids[: (index + 1) * SIZE])
        sequence.num_computed = len(token_ids)
        self.cache.insert(sequence)
        return sequence

    @rule(sequence=running)
    def keep(self, sequence: Sequence | None) -> None:
        """It ended, and others may still read it."""
        if sequence is not None:
            self.cache.keep_partial(sequence)

    @rule(sequence=consumes(running), keeps_partial=st.booleans())
    def finish(self, sequence: Sequence | None, keeps_partial: bool) -> None:
        if sequence is not None:
            if keeps_partial:
                self.cache.keep_partial(sequence)
            self.cache.release(sequence.blocks)
            for block in sequence.blocks:
                self.in_use.remove(block)

    @rule()
    def tell(self) -> None:
        stored, evicted = self.cache.take_changes()
        assert not self.told & set(stored)
        assert self.told >= set(evicted)
        self.told = (self.told | set(stored)) - set(evicted)
        assert len(self.told) == self.cache.num_cached

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_available == NUM_BLOCKS - len(set(self.in_use))


CacheMachine.TestCase.settings = settings(max_examples=60)
TestCache = CacheMachine.TestCase


def test_a_prefix_is_shared_not_copied() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), BLOCK_TOKENS, lambda salt: b"root" + salt)
    one = computed(cache, [1, 2, 3, 4, 5])
    two = computed(cache, [1, 2, 3, 4, 6])
    assert one.blocks[:2] == two.blocks[:2]
    assert one.blocks[2] != two.blocks[2]
    assert cache.num_available == NUM_BLOCKS - 4


def test_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    cache = PrefixCache(BlockPool(4), BLOCK_TOKENS, lambda salt: b"root" + salt)
    for token_ids in ([1, 1, 1, 1], [2, 2, 2, 2]):
        cache.release(computed(cache, token_ids).blocks)
    cache.allocate(1)
    matched = {first: len(cache.match(sequence_of([first] * 5), 4)) for first in (1, 2)}
    assert matched == {1: 1, 2: 2}


def test_a_referenced_block_is_never_evicted() -> None:
    cache = PrefixCache(BlockPool(4), BLOCK_TOKENS, lambda salt: b"root" + salt)
    used = computed(cache, [1, 1, 1, 1])
    cache.release(computed(cache, [2, 2, 2, 2]).blocks)
    assert not set(cache.allocate(2)) & set(used.blocks)
    assert cache.match(sequence_of([1, 1, 1, 1, 9]), 4) == used.blocks


def test_another_root_shares_nothing() -> None:
    pool = BlockPool(8)
    one, two = (PrefixCache(pool, BLOCK_TOKENS, root) for root in (lambda salt: b"one", lambda salt: b"two"))
    keys = [computed(cache, [1, 1, 1, 1]).block_keys for cache in (one, two)]
    assert not set(keys[0]) & set(keys[1])


def test_without_a_root_nothing_is_cached() -> None:
    cache = PrefixCache(BlockPool(8), BLOCK_TOKENS, None)
    cache.release(computed(cache, [1, 1, 1, 1]).blocks)
    assert cache.num_cached == 0
    assert cache.match(sequence_of([1, 1, 1, 1, 1]), 5) == []


def kept(cache: PrefixCache, token_ids: list[int]) -> int:
    """Computes these tokens and keeps all of them. Returns the last block."""
    sequence = computed(cache, token_ids)
    cache.keep_partial(sequence)
    cache.release(sequence.blocks)
    return sequence.blocks[-1]


def begun(cache: PrefixCache, token_ids: list[int], num_whole: int = 1) -> Beginning | None:
    """What is found behind the first whole blocks, of all tokens but the last. Takes no reference."""
    found = cache.beginning(sequence_of(token_ids), num_whole, len(token_ids) - 1)
    cache.release([] if found is None else [found.block])
    return found


def test_the_front_of_a_block_is_found_whole_or_partial() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), 4, lambda salt: b"root" + salt)
    sequence = sequence_of([1, 2, 3, 4, 5, 6])
    sequence.blocks, sequence.num_computed = cache.allocate(2), 6
    cache.insert(sequence)
    cache.keep_partial(sequence)
    cache.release(sequence.blocks)
    whole, partial = sequence.blocks
    assert (cache.num_available, cache.num_cached, len(cache.take_changes().stored)) == (NUM_BLOCKS, 1, 1)
    assert begun(cache, [1, 2, 3, 9, 9], 0) == (whole, 3)
    assert begun(cache, [1, 2, 3], 0) == (whole, 2)  # one is left to compute
    assert begun(cache, [2, 2, 3], 0) is None
    assert begun(cache, [1, 2, 3, 4, 5, 7, 8]) == (partial, 1)
    assert begun(cache, [1, 2, 3, 4, 5, 6, 7]) == (partial, 2)
    assert begun(cache, [1, 2, 3, 4]) is None


def test_what_others_use_or_has_more_tokens_is_not_given_away() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), BLOCK_TOKENS, lambda salt: b"root" + salt)
    last = kept(cache, [1, 2, 3])
    found, other = (cache.beginning(sequence_of([1, 2, 3, 4]), 1, 3) for _ in range(2))
    assert found == other == (last, 1)
    assert found is not None
    assert not cache.give(found, whole_only=True)
    cache.release([last])
    assert cache.give(found, whole_only=True)
    assert begun(cache, [1, 2, 3, 4]) is None
    whole = cache.beginning(sequence_of([1, 5]), 0, 1)
    assert whole is not None
    assert not cache.give(whole, whole_only=False)


def test_a_partial_block_with_more_tokens_is_given_only_to_who_cannot_copy() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), 4, lambda salt: b"root" + salt)
    sequence = sequence_of([1, 2, 3])
    sequence.blocks, sequence.num_computed = cache.allocate(1), 3
    cache.keep_partial(sequence)
    cache.release(sequence.blocks)
    found = cache.beginning(sequence_of([1, 2, 7]), 0, 2)
    assert found is not None
    assert not cache.give(found, whole_only=True)
    assert cache.give(found, whole_only=False)


def test_of_two_partial_blocks_one_is_kept_if_the_other_has_its_tokens() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), 4, lambda salt: b"root" + salt)

    def ended(token_ids: list[int]) -> int:
        sequence = sequence_of(token_ids)
        sequence.blocks, sequence.num_computed = cache.allocate(1), len(token_ids)
        cache.keep_partial(sequence)
        cache.release(sequence.blocks)
        cache.check_integrity()
        return sequence.blocks[0]

    ended([1])
    longer = ended([1, 2])
    assert begun(cache, [1, 2, 9], 0) == (longer, 2)
    ended([1])
    assert begun(cache, [1, 9], 0) == (longer, 1)
    beside = ended([1, 3])
    assert begun(cache, [1, 3, 9], 0) == (beside, 2)
    cache.allocate(NUM_BLOCKS - 2)
    assert begun(cache, [1, 2, 9], 0) is not None
    assert begun(cache, [1, 3, 9], 0) == (beside, 2)


def test_a_partial_block_is_kept_once_however_many_are_behind_the_same_one() -> None:
    cache = PrefixCache(BlockPool(20), BLOCK_TOKENS, lambda salt: b"root" + salt)
    sequences = [computed(cache, [first]) for first in range(20)]
    for sequence in (*sequences, *sequences):
        cache.keep_partial(sequence)
    for sequence in sequences:
        cache.release(sequence.blocks)
    cache.check_integrity()
    assert cache.num_available == 20
    assert begun(cache, [19, 1], 0) == (sequences[-1].blocks[0], 1)


def test_a_partial_block_is_evicted_like_any_other_and_reported_by_no_change() -> None:
    cache = PrefixCache(BlockPool(2), BLOCK_TOKENS, lambda salt: b"root" + salt)
    kept(cache, [1, 2, 3])
    cache.take_changes()
    cache.allocate(1)
    assert cache.take_changes() == ((), ())
    assert begun(cache, [1, 2, 3, 3]) is None
    assert len(cache.match(sequence_of([1, 2, 3]), 2)) == 1
