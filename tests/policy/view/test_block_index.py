"""The block index says what a plain dictionary of sets would say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from halfmoon.policy.view.block_index import BlockEvents, BlockIndex, short_keys, unpack_keys
from halfmoon.policy.view.key_table import Keys, KeyTable

# Few distinct low bits, so that probes collide; 0 and 1 are the same key.
KEYS = st.integers(0, 40).map(lambda number: (number % 3) | (number << 40))
KEY_SETS = st.sets(KEYS.filter(bool), max_size=12)


def keys(*numbers: int) -> Keys:
    return np.array(numbers, dtype=np.uint64)


def prefix(held: set[int], prompt: list[int]) -> int:
    return next((i for i, key in enumerate(prompt) if key not in held), len(prompt))


class IndexAgainstModel(RuleBasedStateMachine):
    """Joins, messages, losses and deaths in any order."""

    @initialize()
    def begin(self) -> None:
        self.index = BlockIndex()
        self.model: dict[str, set[int]] = {}
        self.sequences: dict[str, int] = {}

    @rule(name=st.sampled_from([f"w{i}" for i in range(70)]), held=KEY_SETS)
    def snapshot(self, name: str, held: set[int]) -> None:
        events = BlockEvents(7, keys(*held), is_snapshot=True)
        assert self.index.apply(self.index.number(name), events)
        self.model[name], self.sequences[name] = set(held), 7

    @rule(data=st.data(), stored=KEY_SETS, evicted=KEY_SETS)
    def change(self, data: st.DataObject, stored: set[int], evicted: set[int]) -> None:
        if self.model:
            name = data.draw(st.sampled_from(sorted(self.model)))
            self.sequences[name] += 1
            events = BlockEvents(self.sequences[name], keys(*stored), keys(*(evicted - stored)))
            assert self.index.apply(self.index.number(name), events)
            self.model[name] = (self.model[name] | stored) - (evicted - stored)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.model:
            name = data.draw(st.sampled_from(sorted(self.model)))
            self.index.forget(name)
            del self.model[name]

    @rule(names=st.sets(st.sampled_from([f"w{i}" for i in range(70)]), max_size=3), prompt=st.lists(KEYS.filter(bool)))
    def unite(self, names: set[str], prompt: list[int]) -> None:
        known = names & set(self.model)
        pool = self.index.number("pool")
        self.index.unite(pool, [self.index.number(name) for name in known])
        held = set[int]().union(*(self.model[name] for name in known))
        assert self.index.match(keys(*prompt))[pool] == prefix(held, prompt)
        self.index.unite(pool, [])

    @rule(prompt=st.lists(KEYS.filter(bool), max_size=8))
    def match(self, prompt: list[int]) -> None:
        depths = self.index.match(keys(*prompt))
        assert depths[-1] == 0
        for name, held in self.model.items():
            assert depths[self.index.number(name)] == prefix(held, prompt)

    @invariant()
    def counts_agree(self) -> None:
        assert self.index.num_pairs == sum(map(len, self.model.values()))
        assert all(self.index.num_blocks(self.index.number(name)) == len(held) for name, held in self.model.items())


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_missing_message_waits_for_a_snapshot() -> None:
    index = BlockIndex()
    number = index.number("w")
    assert not index.apply(number, BlockEvents(1, keys(1)))  # nothing before the first snapshot
    assert index.apply(number, BlockEvents(5, keys(1, 2), is_snapshot=True))
    assert index.apply(number, BlockEvents(6, keys(3)))
    assert index.apply(number, BlockEvents(6, keys(9)))  # it was here before
    assert not index.apply(number, BlockEvents(8, keys(4)))
    assert not index.apply(number, BlockEvents(9, evicted=keys(1)))
    assert index.match(keys(1, 2, 3, 4))[number] == 3  # the better guess
    assert index.apply(number, BlockEvents(2, keys(1), is_snapshot=True))
    assert index.match(keys(1, 2, 3, 4))[number] == 1


def test_a_number_goes_to_the_next_holder_without_its_blocks() -> None:
    index = BlockIndex()
    first = index.number("a")
    index.apply(first, BlockEvents(1, keys(1, 2), is_snapshot=True))
    index.forget("a")
    index.forget("a")
    assert index.number("b") == first
    assert index.match(keys(1, 2))[first] == 0
    assert index.num_pairs == 0


def test_churn_does_not_grow_the_index() -> None:
    index, number, rng = BlockIndex(), None, np.random.default_rng(0)
    number = index.number("w")
    index.apply(number, BlockEvents(0, is_snapshot=True))
    held = keys()
    for sequence in range(1, 400):
        new = rng.integers(1, 2**64, size=500, dtype=np.uint64)
        index.apply(number, BlockEvents(sequence, new, held))
        held = new
    assert index.num_pairs == 500
    assert index.num_bytes < 200_000  # 200,000 keys came and went
    assert index.match(held)[number] == 500


def test_dead_holders_leave_no_keys_behind() -> None:
    index, rng = BlockIndex(), np.random.default_rng(0)
    for generation in range(100):
        number = index.number(f"w{generation}")
        mine = rng.integers(1, 2**64, size=3_000, dtype=np.uint64)
        index.apply(number, BlockEvents(1, mine, is_snapshot=True))
        index.forget(f"w{generation}")
    assert index.num_bytes < 1_000_000


def test_short_keys() -> None:
    long = [bytes(range(16)), bytes(16)]
    assert short_keys(long).tolist() == [0x0706050403020100, 1]  # 0 is an empty slot
    assert unpack_keys(b"").tolist() == []


@given(st.lists(st.dictionaries(st.integers(1, 3_000), st.integers(0, 5), max_size=400), max_size=12))
def test_the_table_is_a_dictionary(puts: list[dict[int, int]]) -> None:
    table, model = KeyTable(num_slots=8), dict[int, int]()
    for put in puts:
        table.put(keys(*put), np.array(list(put.values()), dtype=np.uint32))
        model |= put
        asked = range(0, 3_001, 7)
        assert table.get(keys(*asked)).tolist() == [model.get(key, 0) for key in asked]


@pytest.mark.parametrize("num_keys", [1, 5_000, 60_000])
def test_the_table_finds_every_key_while_it_grows(num_keys: int) -> None:
    table, rng = KeyTable(), np.random.default_rng(1)
    every = np.unique(rng.integers(1, 2**64, size=num_keys, dtype=np.uint64))
    values = np.arange(1, len(every) + 1, dtype=np.uint32)
    for part in np.array_split(np.arange(len(every)), max(1, len(every) // 700)):
        table.put(every[part], values[part])
        assert (table.get(every[: part[-1] + 1]) == values[: part[-1] + 1]).all()
