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
        self.cache = PrefixCache(BlockPool(NUM_BLOCKS), BLOCK_TOKENS, lambda salt: b"root" + salt)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.in_use: list[int] = []
        self.told: set[bytes] = set()  # by the changes

    @rule(target=running, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9), leaves_one=st.booleans())
    def run(self, token_ids: list[int], leaves_one: bool) -> Sequence | None:
        if -(-len(token_ids) // BLOCK_TOKENS) > self.cache.num_available:
            return None
        sequence = sequence_of(token_ids)
        num_known = len(token_ids) - leaves_one
        matched = self.cache.match(sequence, num_known)
        assert len(matched) * BLOCK_TOKENS <= num_known
        for index, block in enumerate(matched):
            assert self.content[block] == tuple(token_ids[: (index + 1) * BLOCK_TOKENS])
        fresh = self.cache.allocate(-(-len(token_ids) // BLOCK_TOKENS) - len(matched))
        assert not set(fresh) & set(self.in_use)
        sequence.num_known_blocks = len(matched)
        sequence.blocks = matched + fresh
        self.in_use += sequence.blocks
        for index, block in enumerate(fresh, len(matched)):
            self.content[block] = tuple(token_ids[: (index + 1) * BLOCK_TOKENS])
        sequence.num_computed = len(token_ids)
        self.cache.insert(sequence)
        return sequence

    @rule(sequence=consumes(running))
    def finish(self, sequence: Sequence | None) -> None:
        if sequence is not None:
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
