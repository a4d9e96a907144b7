"""A cached prefix is found exactly, shared without copies, and evicted only when nobody uses it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
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

    @rule(target=running, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10), leaves_one=st.booleans())
    def run(self, token_ids: list[int], leaves_one: bool) -> Sequence | None:
        if -(-len(token_ids) // SIZE) > self.cache.num_available:
            return None
        sequence = sequence_of(token_ids)
        num_known = len(token_ids) - leaves_one
        matched = self.cache.match(sequence, num_known)
        assert len(matched) * SIZE <= num_known
        for index, block in enumerate(matched):
            assert self.content[block] == tuple(token_ids[: (index + 1) * SIZE])
        sequence.num_known_blocks = len(matched)
        partial = self.cache.take_partial(sequence, len(matched), num_known)
        if partial is not None:
            assert partial.block not in self.in_use
            known = tuple(token_ids[: len(matched) * SIZE + len(partial.token_ids)])
            assert self.content[partial.block][: len(known)] == known
            assert len(matched) * SIZE < len(known) <= num_known
            matched.append(partial.block)
        fresh = self.cache.allocate(-(-len(token_ids) // SIZE) - len(matched))
        assert not set(fresh) & set(self.in_use)
        sequence.blocks = matched + fresh
        self.in_use += sequence.blocks
        for index, block in enumerate(sequence.blocks[sequence.num_known_blocks :], sequence.num_known_blocks):
            self.content[block] = tuple(token_ids[: (index + 1) * SIZE])
        sequence.num_computed = len(token_ids)
        self.cache.insert(sequence)
        return sequence

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


def left_off(cache: PrefixCache, token_ids: list[int]) -> int:
    """Computes these tokens and keeps all of them. Returns the last block."""
    sequence = computed(cache, token_ids)
    cache.keep_partial(sequence)
    cache.release(sequence.blocks)
    return sequence.blocks[-1]


def test_a_partial_block_goes_to_one_sequence_that_goes_on_from_it() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), 4, lambda salt: b"root" + salt)
    sequence = sequence_of([1, 2, 3, 4, 5, 6])
    sequence.blocks, sequence.num_computed = cache.allocate(2), 6
    cache.insert(sequence)
    cache.keep_partial(sequence)
    cache.release(sequence.blocks)
    assert (cache.num_available, cache.num_cached, len(cache.take_changes().stored)) == (NUM_BLOCKS, 1, 1)
    for token_ids in ([1, 2, 3, 4, 5, 7, 8], [5, 6, 7], [1, 2, 3, 4]):
        other = sequence_of(token_ids)
        assert cache.take_partial(other, len(cache.match(other, 6)), len(token_ids) - 1) is None
    for num_tokens, taken in ((5, (5,)), (8, None)):
        following = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
        partial = cache.take_partial(following, 1, num_tokens)
        assert (None if partial is None else partial) == (taken and (sequence.blocks[1], taken))


def test_a_later_partial_block_replaces_an_earlier_one_behind_the_same_block() -> None:
    cache = PrefixCache(BlockPool(NUM_BLOCKS), BLOCK_TOKENS, lambda salt: b"root" + salt)
    left_off(cache, [1, 2, 3])
    last = left_off(cache, [1, 2, 4])
    cache.check_integrity()
    assert cache.take_partial(sequence_of([1, 2, 3, 3]), 1, 3) is None
    assert cache.take_partial(sequence_of([1, 2, 4, 4]), 1, 3) == (last, (4,))


def test_a_partial_block_is_evicted_like_any_other_and_reported_by_no_change() -> None:
    cache = PrefixCache(BlockPool(2), BLOCK_TOKENS, lambda salt: b"root" + salt)
    left_off(cache, [1, 2, 3])
    cache.take_changes()
    cache.allocate(1)
    assert cache.take_changes() == ((), ())
    assert cache.take_partial(sequence_of([1, 2, 3, 3]), 1, 3) is None
    assert len(cache.match(sequence_of([1, 2, 3]), 2)) == 1
