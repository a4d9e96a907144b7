"""Finds blocks that already hold a prompt's prefix. No torch."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import NamedTuple

from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.spread_pool import Blocks
from halfmoon.errors import NoCapacity
from halfmoon.kv.keys import child_key

EVERY_BLOCK = 1 << 62
"""Known blocks of a sequence of which nothing more is to be found."""

_MOST_COMPARED = 16  # blocks behind the same one, the latest first


class CacheChanges(NamedTuple):
    """Keys of blocks that became available, and of those that ceased to be."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


class Beginning(NamedTuple):
    """The first tokens of a block."""

    block: int
    num_tokens: int


class PrefixCache:
    """Owns the map from block keys to blocks, and the order in which unused ones are evicted (least recently used).

    It holds one reference to each cached block. A block without other references is idle: still found by `match`, and
    evicted when `allocate` runs short. Whole, computed blocks are cached and shared; partial ones are kept where
    `keep_partial` is called, and no change reports them. Tokens at the front of either are found by `beginning`, to be
    copied, or, of a partial block, to be gone on from in place (`give`). `root` maps a tenant's salt to the parent key
    of its first blocks; with None nothing is cached.
    """

    def __init__(self, pool: Blocks, block_tokens: int, root: Callable[[bytes], bytes] | None) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._root = root
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._token_ids: dict[int, array[int]] = {}  # of each cached block, whole or partial
        self._parents: dict[int, bytes] = {}  # of each, the key of the block before
        self._behind: dict[bytes, dict[int, None]] = {}  # cached blocks by their parents, least recently used first
        self._idle: OrderedDict[int, bool] = OrderedDict()  # whether it is a half; least recently used first
        self._num_idle_halves = 0
        self._stored: dict[bytes, None] = {}  # since `take_changes` was last called
        self._evicted: dict[bytes, None] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and idle ones."""
        return self._pool.num_free_with(len(self._idle) - self._num_idle_halves, self._num_idle_halves)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a known prefix, idle or in use."""
        return len(self._blocks)

    def match(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Takes references to the blocks that are `found`."""
        blocks = self.found(sequence, num_tokens)
        for block in blocks:
            self._note_used(block)
        self._pool.share(blocks)
        return blocks

    def allocate(self, num_blocks: int, near: int | None = None, room: int = 0) -> list[int]:
        """Calls `BlockPool.allocate`, evicting idle blocks as needed. Raises NoCapacity, and then evicts nothing."""
        if num_blocks > self.num_available:
            raise NoCapacity(f"{num_blocks} blocks are wanted, {self.num_available} are available")
        while self._pool.num_free < num_blocks:
            self._evict()
        return self._pool.allocate(num_blocks, near, room)

    def release(self, blocks: SequenceOf[int]) -> None:
        """Drops references. The last block of a prefix goes idle first, so that it is evicted first."""
        for block in reversed(blocks):
            self._pool.release([block])
            if block in self._parents and self._pool.references(block) == 1:
                self._idle[block] = self._pool.is_half(block)
                self._num_idle_halves += self._idle[block]

    def hold(self, keys: SequenceOf[bytes]) -> list[int]:
        """Takes references to the blocks of the leading keys that are cached; drop them with `release`."""
        blocks: list[int] = []
        for key in keys:
            if key not in self._blocks:
                break
            blocks.append(self._blocks[key])
            self._note_used(blocks[-1])
        self._pool.share(blocks)
        return blocks

    def num_users(self, block: int) -> int:
        """Sequences and readers that refer to a block in use."""
        return self._pool.references(block) - (block in self._parents)

    def found(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The blocks of the longest cached prefix of the first `num_tokens`; takes no references."""
        blocks: list[int] = []
        for index in range(num_tokens // self._block_tokens if self._root is not None else 0):
            block = self._blocks.get(self._key(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, sequence: Sequence) -> bool:
        """Makes the sequence's computed full blocks findable, unless none may share them. Of two equal the first stays.

        Returns whether any were new.
        """
        num_full = sequence.num_findable // self._block_tokens
        if self._root is None or num_full <= sequence.num_known_blocks:
            return False
        for index in range(sequence.num_known_blocks, num_full):
            key, block = self._key(sequence, index), sequence.blocks[index]
            if key not in self._blocks:
                self._blocks[key] = block
                self._keys[block] = key
                self._add(block, self._parent_key(sequence, index), self._tokens(sequence, index))
                _note(key, self._stored, self._evicted)
        sequence.num_known_blocks = num_full
        return True

    def keep_partial(self, sequence: Sequence) -> None:
        """Lets others find the last block of a sequence's computed tokens, unless it is whole, from now on.

        The sequence computes no more; the block stays once it releases it. Without effect if it is kept already, or
        another one has these tokens, on a sequence that shares nothing, and on one whose tokens do not see all before
        them. One that nobody uses, and whose tokens these begin with, is given up for it.
        """
        num_full, num_more = divmod(sequence.num_computed, self._block_tokens)
        is_known = self._root is not None and sequence.policy is None and sequence.num_known_blocks == num_full
        if not is_known or not num_more or sequence.dropped or sequence.blocks[num_full] in self._parents:
            return
        parent = self._parent_key(sequence, num_full)
        token_ids = self._tokens(sequence, num_full, sequence.num_computed)
        for other in tuple(self._compared(parent)):
            num_same = _num_same(self._token_ids[other], token_ids)
            if num_same == num_more:
                return
            if num_same == len(self._token_ids[other]) and other in self._idle:
                self._forget(other)
                self._pool.release([other])
        self._add(sequence.blocks[num_full], parent, token_ids)

    def beginning(self, sequence: Sequence, num_whole: int, num_tokens: int) -> Beginning | None:
        """The cached block with the most of the tokens behind the sequence's first `num_whole` blocks, to `num_tokens`.

        Takes a reference to it; drop it with `release`. None: nobody has any.
        """
        if self._root is None or num_tokens <= num_whole * self._block_tokens:
            return None
        wanted = self._tokens(sequence, num_whole, num_tokens)
        compared = self._compared(self._parent_key(sequence, num_whole))
        found = max(
            (Beginning(one, _num_same(self._token_ids[one], wanted)) for one in compared), key=_size, default=None
        )
        if found is None or not found.num_tokens:
            return None
        self._note_used(found.block)
        self._pool.share([found.block])
        return found

    def give(self, found: Beginning, *, whole_only: bool) -> bool:
        """Makes a kept, partial block the caller's alone, which writes behind the tokens that were found.

        Returns False, and changes nothing, for a whole block and one that others use; with `whole_only` for one with
        more tokens than were found, too.
        """
        block = found.block
        if block in self._keys or self._pool.references(block) != 2:
            return False
        if whole_only and len(self._token_ids[block]) > found.num_tokens:
            return False
        self._forget(block)
        self._pool.release([block])
        return True

    def forget_idle(self) -> None:
        """Evicts every idle block."""
        while self._idle:
            self._evict()

    def take_changes(self) -> CacheChanges:
        """Changes since the last call; a block that was evicted and stored again counts as unchanged."""
        changes = CacheChanges(tuple(self._stored), tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return changes

    def check_integrity(self) -> None:
        """Asserts that both maps, the idle blocks and the pool agree."""
        self._pool.check_integrity()
        assert self._keys == {block: key for key, block in self._blocks.items()}, "the maps disagree"
        assert self._keys.keys() <= self._parents.keys() == self._token_ids.keys(), "a cached block is unknown"
        behind = {block: parent for parent, blocks in self._behind.items() for block in blocks}
        assert behind == self._parents, "the blocks behind a block disagree"
        idle = {block for block in self._parents if self._pool.references(block) == 1}
        assert idle == set(self._idle), "a block is idle and referenced, or neither"
        assert all(self._pool.is_half(block) == is_half for block, is_half in self._idle.items()), "an idle block moved"
        assert sum(self._idle.values()) == self._num_idle_halves, "the number of idle halves is wrong"

    def _evict(self) -> None:
        block = next(iter(self._idle))
        self._forget(block)
        self._pool.release([block])

    def _tokens(self, sequence: Sequence, index: int, num_tokens: int | None = None) -> array[int]:
        """The tokens of a sequence's block `index`, as far as they are among its first `num_tokens`; None: all."""
        start = index * self._block_tokens
        end = start + self._block_tokens
        return array("i", sequence.token_ids[start : end if num_tokens is None else min(end, num_tokens)])

    def _add(self, block: int, parent: bytes, token_ids: array[int]) -> None:
        """Takes a reference to a block with these tokens, the only one of the cache."""
        assert block not in self._parents, f"block {block} is cached twice"
        self._token_ids[block] = token_ids
        self._parents[block] = parent
        self._behind.setdefault(parent, {})[block] = None
        self._pool.share([block])

    def _forget(self, block: int) -> None:
        """Its reference is the caller's."""
        self._note_used(block)
        parent = self._parents.pop(block)
        del self._token_ids[block], self._behind[parent][block]
        if not self._behind[parent]:
            del self._behind[parent]
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            _note(key, self._evicted, self._stored)

    def _compared(self, parent: bytes) -> Iterator[int]:
        """The latest blocks behind one."""
        return islice(reversed(self._behind.get(parent, {})), _MOST_COMPARED)

    def _note_used(self, block: int) -> None:
        self._num_idle_halves -= self._idle.pop(block, False)
        siblings = self._behind[self._parents[block]]
        del siblings[block]
        siblings[block] = None

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Key of the sequence's block `index`; computed once, in order, and kept with the sequence."""
        keys = sequence.block_keys
        while len(keys) <= index:
            start = len(keys) * self._block_tokens
            parent = self._parent_key(sequence, len(keys))
            keys.append(child_key(parent, sequence.token_ids[start : start + self._block_tokens]))
        return keys[index]

    def _parent_key(self, sequence: Sequence, index: int) -> bytes:
        """Key of the block before block `index`."""
        assert self._root is not None
        return self._key(sequence, index - 1) if index else self._root(sequence.request.tenant_salt)


def _size(found: Beginning) -> int:
    return found.num_tokens


def _num_same(one: array[int], other: array[int]) -> int:
    """Leading tokens that are the same."""
    num_both = min(len(one), len(other))
    if one[:num_both] == other[:num_both]:
        return num_both
    return next(index for index in range(num_both) if one[index] != other[index])


def _note(key: bytes, done: dict[bytes, None], undone: dict[bytes, None]) -> None:
    if key in undone:
        del undone[key]
    else:
        done[key] = None
