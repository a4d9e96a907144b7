"""What a block is worth to the store, of which nobody said what it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.catalog.known_costs import KnownCosts
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.eviction import policy_named

SMALL, LARGE = KVLayout(2, 2, 16, "float32", 64), KVLayout(4, 2, 16, "float32", 64)


def meta(number: int, recompute_s: float = 0.0, layout: KVLayout | None = SMALL) -> BlockMeta:
    return BlockMeta(block_id(bytes([number]) * 16), layout=layout, recompute_s=recompute_s)


@given(st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=1))
def test_it_is_the_mean_of_what_is_known_of_its_layout(costs_s: list[float]) -> None:
    costs = KnownCosts()
    for cost_s in costs_s:
        costs.note(meta(0, cost_s))
        costs.note(meta(1, 0.0))
        costs.note(meta(2, 100.0, LARGE))
    assert costs.recompute_s(meta(3)) == pytest.approx(sum(costs_s) / len(costs_s))
    assert costs.recompute_s(meta(3, 7.0)) == 7.0


def test_of_a_layout_of_which_nothing_is_known_it_is_unknown() -> None:
    costs = KnownCosts()
    costs.note(meta(0, 1.0))
    assert costs.recompute_s(meta(1, 0.0, LARGE)) == costs.recompute_s(meta(1, 0.0, None)) == 0.0


def test_the_mean_follows_workers_that_became_faster() -> None:
    costs = KnownCosts()
    for cost_s in (9.0, 1.0):
        for _ in range(10_000):
            costs.note(meta(0, cost_s))
    assert costs.recompute_s(meta(1)) == pytest.approx(1.0, abs=0.01)


def catalog() -> Catalog:
    return Catalog({tier: policy_named("cost-aware") for tier in Tier})


@pytest.mark.parametrize("scale", [1e-3, 1e3])  # far below and far above what would be assumed of it
def test_cost_aware_eviction_takes_it_for_one_of_its_layout(scale: float) -> None:
    it = catalog()
    dear, cheap, unknown = meta(0, 3 * scale), meta(1, scale), meta(2)
    for block in (dear, cheap, unknown):
        it.add(block, Tier.DRAM, 1)
    assert [it.pop_victim(Tier.DRAM) for _ in range(3)] == [cheap.id, unknown.id, dear.id]


def test_a_block_counts_once_however_many_tiers_have_it() -> None:
    it = catalog()
    for tier in Tier:
        it.add(meta(0, 1.0), tier, 1)
    it.add(meta(1, 3.0), Tier.DRAM, 1)
    it.add(meta(2), Tier.DRAM, 1)
    entry = it.get(meta(2).id)
    assert entry is not None
    assert (entry.usage.recompute_s, entry.meta.recompute_s) == (2.0, 0.0)


def test_what_a_later_copy_knows_counts() -> None:
    it = catalog()
    it.add(meta(0), Tier.DRAM, 1)
    it.add(meta(0, 5.0), Tier.DRAM, 1)
    it.add(meta(1), Tier.DRAM, 1)
    costs = [entry.usage.recompute_s for entry in it]
    assert costs == [5.0, 5.0]
