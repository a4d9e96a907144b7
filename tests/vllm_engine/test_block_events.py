"""Blocks that vLLM caches have the keys that our own engine, the gateway and the stores use."""

from __future__ import annotations

from halfmoon.kv.keys import block_keys
from halfmoon.vllm_engine.frontend.block_events import BlockNames, CacheChange
from tests.vllm_engine.fake_vllm import AllBlocksCleared, BlockRemoved, BlockStored

TOKENS = list(range(12))
KEYS = block_keys(b"root-", TOKENS, 4)


def names() -> BlockNames:
    return BlockNames(lambda salt: b"root-" + salt, 4)


def test_chains_go_on_from_their_parents() -> None:
    found = names()
    assert found.apply([BlockStored([1, 2], None, TOKENS[:8], 4)]) == CacheChange(tuple(KEYS[:2]), ())
    assert found.apply([BlockStored([3], 2, TOKENS[8:], 4)]) == CacheChange((KEYS[2],), ())
    assert found.depth(TOKENS, b"") == 12
    assert found.depth([*TOKENS[:7], 99, *TOKENS[8:]], b"") == 4
    assert found.depth(TOKENS, b"other") == 0


def test_a_tenants_salt_is_in_its_keys() -> None:
    found = names()
    found.apply([BlockStored([1], None, TOKENS[:4], 4, [("74",)])])
    assert found.depth(TOKENS, b"t") == 4
    assert found.depth(TOKENS, b"") == 0


def test_an_adapters_name_is_no_part_of_the_salt() -> None:
    found = names()
    found.apply([BlockStored([1], None, TOKENS[:4], 4, [("beef", "fe74")], lora_name="beef")])
    assert found.depth(TOKENS, b"\xfet") == 4
    assert found.depth(TOKENS, b"\xbe\xef\xfet") == 0


def test_private_blocks_unknown_parents_and_other_sizes_are_left_out() -> None:
    found = names()
    events = [
        BlockStored([1], None, TOKENS[:4], 4, [("private 00ff",)]),
        BlockStored([2], 1, TOKENS[4:8], 4),
        BlockStored([3], 77, TOKENS[:4], 4),
        BlockStored([4], None, TOKENS[:2], 2),
    ]
    assert found.apply(events) == CacheChange((), ())


def test_removed_blocks_leave_and_come_back() -> None:
    found = names()
    found.apply([BlockStored([1, 2], None, TOKENS[:8], 4)])
    assert found.apply([BlockRemoved([1, 9])]) == CacheChange((), (KEYS[0],))
    assert found.depth(TOKENS, b"") == 0
    both = [BlockRemoved([2]), BlockStored([1, 2], None, TOKENS[:8], 4)]
    assert found.apply(both) == CacheChange(tuple(KEYS[:2]), ())
    assert found.apply([AllBlocksCleared()]) == CacheChange((), tuple(KEYS[:2]))
    assert found.depth(TOKENS, b"") == 0


def test_lost_events_empty_the_index() -> None:
    found = names()
    found.apply([BlockStored([1, 2], None, TOKENS[:8], 4)])
    assert set(found.forget().evicted) == set(KEYS[:2])
    assert found.apply([BlockStored([3], 2, TOKENS[8:], 4)]) == CacheChange((), ())
