"""The law of prefixes under any sequence of calls, and each rule of the catalog by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.kv.index import Prompt, read_trace, replay
from halfmoon.catalog.block_identity import BlockMeta, block_id, key_of, tag_of, tenant_tag
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Change, Tier
from halfmoon.kv.owner import KVOwner
from halfmoon.policy.eviction import PolicyName, policy_named

PARENTS = [None, 0, 1, 1, 3, None, 5, 3, 4]  # two trees: 0-1-{2, 3-{4-8, 7}} and 5-6
IDS = [block_id(bytes([n]) * 16) for n in range(len(PARENTS))]
TIERS = st.sampled_from(list(Tier))
BLOCKS = st.sampled_from(range(len(PARENTS)))
TENANTS = st.sampled_from(["", "a", "b"])
POLICIES: list[PolicyName] = ["lru", "lfu", "length-aware", "cost-aware"]


def meta(block: int, expires_at_s: float = math.inf, recompute_s: float = 0.0) -> BlockMeta:
    parent, depth, above = PARENTS[block], 0, PARENTS[block]
    while above is not None:
        depth, above = depth + 1, PARENTS[above]
    parent_id = None if parent is None else IDS[parent]
    return BlockMeta(IDS[block], parent_id, depth, None, recompute_s, expires_at_s)


def catalog(policy: PolicyName = "lru", changes: list[Change] | None = None) -> Catalog:
    policies = {tier: policy_named(policy) for tier in Tier}
    return Catalog(policies, (lambda change: None) if changes is None else changes.append)


class CatalogMachine(RuleBasedStateMachine):
    """A model of sets: which (block, tier) there is, as the changes told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[tuple[bytes, Tier]] = set()
        self.catalog = Catalog({tier: policy_named(POLICIES[tier]) for tier in Tier}, self._on_change)
        self.now_s = 0.0
        self.held: list[bytes] = []

    def _on_change(self, change: Change) -> None:
        pair = (change.block, change.tier)
        if change.held:
            assert change.first == (not any(block == change.block for block, _ in self.told))
            self.told.add(pair)
        else:
            self.told.remove(pair)
            assert change.gone == (not any(block == change.block for block, _ in self.told))

    @rule(block=BLOCKS, tier=TIERS, num_bytes=st.integers(1, 9), ttl_s=st.sampled_from([math.inf, 3.0]), tenant=TENANTS)
    def add(self, block: int, tier: Tier, num_bytes: int, ttl_s: float, tenant: str) -> None:
        wanted = replace(meta(block, self.now_s + ttl_s), tenant=tenant)
        if self.catalog.can_add(wanted.parent, tier):
            before = self.catalog.get(wanted.id)
            first = before.meta.tenant if before is not None else ""
            self.catalog.add(wanted, tier, num_bytes)
            assert self.catalog.is_in(wanted.id, tier)
            entry = self.catalog.get(wanted.id)
            assert entry is not None
            assert entry.meta.tenant == (first or tenant), "whoever brought it first, once that is known"

    @rule(tenant=TENANTS, quota_bytes=st.integers(0, 20))
    def give_a_quota(self, tenant: str, quota_bytes: int) -> None:
        self.catalog.tenants.set_quota(KVOwner(tenant, quota_bytes))

    @rule(tenant=TENANTS)
    def evict_of_a_tenant(self, tenant: str) -> None:
        own = [entry for entry in self.catalog if entry.meta.tenant == tenant]
        free = [entry for entry in own if not (entry.children or entry.pinned or entry.num_holds)]
        oldest = min(free, key=lambda entry: entry.usage.last_used, default=None)
        assert self.catalog.evict_of_tenant(tenant) == (oldest is not None)
        assert oldest is None or oldest.meta.id not in self.catalog

    @rule(tier=TIERS)
    def evict(self, tier: Tier) -> None:
        pinned = {entry.meta.id for entry in self.catalog if entry.pinned or entry.num_holds}
        block = self.catalog.pop_victim(tier)
        assert block not in pinned
        if block is None and tier is Tier.DRAM:  # nothing is faster, so only pins and holds can be in the way
            held = [entry for entry in self.catalog if tier in entry.tiers and not entry.num_children_in[tier]]
            assert all(entry.pinned or entry.num_holds for entry in held)

    @rule(block=BLOCKS, tier=TIERS)
    def lose(self, block: int, tier: Tier) -> None:
        self.catalog.lose(IDS[block], tier)
        assert not self.catalog.is_in(IDS[block], tier)

    @rule(block=BLOCKS)
    def drop(self, block: int) -> None:
        was_here = IDS[block] in self.catalog
        assert (self.catalog.drop(IDS[block]) > 0) == was_here
        assert IDS[block] not in self.catalog

    @rule(block=BLOCKS, pinned=st.booleans())
    def pin(self, block: int, pinned: bool) -> None:
        assert self.catalog.pin(IDS[block], pinned) == (IDS[block] in self.catalog)

    @rule(block=BLOCKS)
    def hold(self, block: int) -> None:
        if IDS[block] in self.catalog:
            self.catalog.hold(IDS[block])
            self.held.append(IDS[block])

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.catalog.release(self.held.pop())

    @rule(chain=st.lists(BLOCKS, max_size=4))
    def match(self, chain: list[int]) -> None:
        found = self.catalog.match([IDS[block] for block in chain], self.now_s)
        assert [entry.meta.id for entry in found] == [IDS[block] for block in chain[: len(found)]]

    @rule(chain=st.lists(BLOCKS, max_size=4, unique=True))
    def find(self, chain: list[int]) -> None:
        found = self.catalog.find([IDS[block] for block in chain], self.now_s)
        live = [place for place, block in enumerate(chain) if self.catalog.live(IDS[block], self.now_s)]
        assert list(found) == live

    @rule(tier=TIERS)
    def look_at_the_coldest(self, tier: Tier) -> None:
        used_s = {entry.meta.id: entry.used_s for entry in self.catalog}
        idle_s = self.catalog.room_idle_s(tier, 0, self.now_s)
        block = self.catalog.pop_victim(tier)
        assert idle_s == (0.0 if block is None else max(0.0, self.now_s - used_s[block]))

    @rule(by_s=st.sampled_from([1.0, 2.5]))
    def later(self, by_s: float) -> None:
        self.now_s += by_s
        self.catalog.expire(self.now_s)
        for entry in self.catalog:
            if entry.meta.expires_at_s <= self.now_s:
                assert self._protected(entry.meta.id)

    def _protected(self, block: bytes) -> bool:
        entry = self.catalog.get(block)
        assert entry is not None
        return bool(entry.pinned or entry.num_holds) or any(self._protected(child) for child in entry.children)

    @invariant()
    def the_law_holds(self) -> None:
        self.catalog.check_integrity()
        assert self.told == {(entry.meta.id, tier) for entry in self.catalog for tier in entry.tiers}


CatalogMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestCatalog = CatalogMachine.TestCase


def filled(policy: PolicyName = "lru", tier: Tier = Tier.DRAM) -> Catalog:
    """Every block in one tier, in order."""
    made = catalog(policy)
    for block in range(len(PARENTS)):
        made.add(meta(block), tier, 1)
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_goes_in_the_end_and_never_a_beginning_first(policy: PolicyName) -> None:
    it = filled(policy)
    gone: list[bytes] = []
    while (victim := it.pop_victim(Tier.DRAM)) is not None:
        gone.append(victim)
        it.check_integrity()
    assert sorted(gone) == sorted(IDS)
    for block, parent in enumerate(PARENTS):
        if parent is not None:
            assert gone.index(IDS[parent]) > gone.index(IDS[block])


def test_lru_takes_the_longest_unused_leaf() -> None:
    it = filled()
    it.match([IDS[0], IDS[1], IDS[2]], 0)
    assert [it.pop_victim(Tier.DRAM) for _ in range(3)] == [IDS[6], IDS[5], IDS[7]]


def test_lfu_takes_the_least_often_used_leaf() -> None:
    it = filled("lfu")
    it.match([IDS[5], IDS[6]], 0)
    it.match([IDS[0], IDS[1], IDS[3], IDS[4], IDS[8]], 0)
    it.match([IDS[0], IDS[1], IDS[3], IDS[7]], 0)
    assert [it.pop_victim(Tier.DRAM) for _ in range(2)] == [IDS[2], IDS[6]]


def test_length_aware_takes_the_latest_in_its_prompt_of_those_used_equally() -> None:
    assert [filled("length-aware").pop_victim(Tier.DRAM)] == [IDS[8]]


def test_cost_aware_takes_the_cheapest_per_byte_and_lets_old_fame_fade() -> None:
    it = catalog("cost-aware")
    first, second, third = (BlockMeta(IDS[n], recompute_s=cost) for n, cost in enumerate((8.0, 2.0, 3.0)))
    it.add(first, Tier.DRAM, 4)  # 2 s a byte
    it.add(second, Tier.DRAM, 2)  # 1
    it.add(third, Tier.DRAM, 1)  # 3
    assert it.pop_victim(Tier.DRAM) == second.id
    it.add(second, Tier.DRAM, 1)  # 1 + 2: what went last had 1
    assert it.pop_victim(Tier.DRAM) == first.id


def test_a_pinned_end_keeps_its_whole_prefix() -> None:
    it = filled()
    it.pin(IDS[8], True)
    while it.pop_victim(Tier.DRAM) is not None:
        pass
    assert sorted(entry.meta.id for entry in it) == sorted(IDS[n] for n in (0, 1, 3, 4, 8))
    it.pin(IDS[8], False)
    assert it.pop_victim(Tier.DRAM) == IDS[8]


def test_a_slow_tier_keeps_the_only_beginning_of_what_a_fast_one_holds() -> None:
    it = catalog()
    it.add(meta(0), Tier.DISK, 1)
    it.add(meta(1), Tier.DRAM, 1)
    assert it.pop_victim(Tier.DISK) is None
    it.add(meta(0), Tier.DRAM, 1)
    assert it.pop_victim(Tier.DISK) == IDS[0]


def test_what_follows_a_lost_block_stays_and_is_joined_to_it_when_it_comes_again() -> None:
    it = catalog()
    for block in (0, 1, 3):
        it.add(meta(block), Tier.DISK, 1)
    it.lose(IDS[0], Tier.DISK)
    assert it.match([IDS[0], IDS[1], IDS[3]], 0) == []
    assert list(it.find([IDS[0], IDS[1], IDS[3]], 0)) == [1, 2]
    it.add(meta(0), Tier.DRAM, 1)
    it.add(meta(0), Tier.DISK, 1)
    assert [it.pop_victim(Tier.DISK) for _ in range(3)] == [IDS[3], IDS[1], IDS[0]]
    assert it.drop(IDS[0]) == 1


def test_a_fragment_is_evicted_from_its_end_whatever_is_missing_before_it() -> None:
    it = catalog()
    for block in (3, 1, 8):  # 0 and 4 are on other stores
        it.add(meta(block), Tier.DRAM, 1)
    it.find([IDS[block] for block in (0, 1, 3, 4, 8)], 0)
    assert it.fragments.num_begun_elsewhere == 2
    assert [it.pop_victim(Tier.DRAM) for _ in range(3)] == [IDS[8], IDS[3], IDS[1]]


def test_the_block_that_makes_room_is_the_one_that_goes_next() -> None:
    it = catalog()
    assert it.room_idle_s(Tier.DRAM, 0, 3.0) == 0, "nothing may be evicted"
    it.live(IDS[0], 5.0)
    it.add(meta(0), Tier.DRAM, 1)
    it.live(IDS[5], 7.0)
    it.add(meta(5), Tier.DRAM, 1)
    assert it.room_idle_s(Tier.DRAM, 2, 8.0) == 3.0
    assert it.room_idle_s(Tier.DRAM, 3, 8.0) == math.inf, "there is room"
    it.find([IDS[0]], 9.0)
    assert it.room_idle_s(Tier.DRAM, 2, 9.0) == 2.0
    assert it.pop_victim(Tier.DRAM) == IDS[5]


def test_an_expired_block_is_a_miss_before_it_is_swept() -> None:
    it = catalog()
    it.add(meta(0, expires_at_s=10), Tier.DRAM, 1)
    it.add(meta(1), Tier.DRAM, 1)
    assert len(it.match([IDS[0], IDS[1]], 9.9)) == 2
    assert it.match([IDS[0], IDS[1]], 10) == []
    assert it.expire(10) == 2
    assert list(it) == []


def test_times_of_blocks_that_left_otherwise_are_forgotten() -> None:
    it = catalog()
    it.add(meta(0, expires_at_s=10), Tier.DRAM, 1)
    for _ in range(5000):
        it.add(meta(5, expires_at_s=20), Tier.DRAM, 1)
        it.drop(IDS[5])
    assert len(it._expiries) < 2000
    assert it.expire(10) == 1


@pytest.mark.parametrize("ring", [[0], [0, 1], [0, 2, 1]])
def test_no_block_comes_before_itself(ring: list[int]) -> None:
    it = catalog()
    metas = [BlockMeta(IDS[block], IDS[before]) for before, block in zip(ring, ring[1:] + ring[:1], strict=True)]
    for one in metas[:-1]:
        assert it.can_begin(one)
        it.add(one, Tier.DRAM, 1)
    assert not it.can_begin(metas[-1])
    assert all(it.can_begin(one) for one in metas[:-1]), "they are here"


def test_accounts_may_be_read_while_another_thread_adds_some() -> None:
    accounts = catalog().tenants

    class Interrupted:
        @property
        def num_blocks(self) -> int:
            accounts.set_quota(KVOwner("new", 1))
            return 0

    accounts._accounts["old"] = Interrupted()  # type: ignore[assignment]
    assert list(accounts) == []


def test_a_block_does_not_outlive_its_predecessor_of_the_same_store() -> None:
    it = catalog()
    assert it.can_add(IDS[0], Tier.DISK), "its predecessor is elsewhere"
    it.add(meta(0), Tier.DRAM, 1)
    assert it.can_add(IDS[0], Tier.DRAM)
    assert not it.can_add(IDS[0], Tier.DISK), "the disk would outlive its beginning"


def test_tenants_with_other_salts_have_other_ids() -> None:
    key = b"k" * 16
    ids = {block_id(key), block_id(key, b"a"), block_id(key, b"b")}
    assert len(ids) == 3
    assert {key_of(block) for block in ids} == {key}
    assert tag_of(block_id(key, b"a")) == tenant_tag(b"a") != b"a"


def test_candidates_that_left_otherwise_are_forgotten() -> None:
    it = catalog()
    for n in range(1000):
        it.add(BlockMeta(block_id(n.to_bytes(16, "big"))), Tier.DRAM, 1)
        it.drop(block_id(n.to_bytes(16, "big")))
    assert it.pop_victim(Tier.DRAM) is None
    assert it.num_blocks(Tier.DRAM) == 0


# Mooncake's traces are not ours to ship: this runs where they lie beside the checkout
TRACES = Path(__file__).parents[3] / "shared/data/mooncake"


def test_a_replay_counts_what_was_there() -> None:
    a, b, c = IDS[:3]
    prompts = [Prompt(1024, [a, b]), Prompt(700, [a, b]), Prompt(1024, [a, c]), Prompt(600, [a, b])]
    everything = replay(prompts, "lru", None)
    assert (everything.num_hit_blocks, everything.num_hit_tokens) == (5, 700 + 512 + 600)
    assert replay(prompts, "lru", 2).num_hit_blocks == 4
    assert replay(prompts, "lru", 1).num_hit_blocks == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trace", "infinite", "lru_10k"), [("synthetic", 0.651, 0.423), ("conversation", 0.374, 0.211)]
)
def test_traces_of_mooncake_hit_as_they_are_known_to(trace: str, infinite: float, lru_10k: float) -> None:
    path = TRACES / f"{trace}_trace.jsonl"
    if not path.exists():
        pytest.skip("the trace is not here")
    prompts = read_trace(path)
    everything, some = replay(prompts, "lru", None), replay(prompts, "lru", 10_000)
    assert everything.num_hit_tokens / everything.num_tokens == pytest.approx(infinite, abs=0.0005)
    # a plain LRU; keeping every block's beginning gains a little
    assert lru_10k - 0.0005 <= some.num_hit_blocks / some.num_blocks <= lru_10k + 0.002
