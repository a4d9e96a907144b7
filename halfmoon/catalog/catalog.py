"""Which block is in which tier, and the law of fragments. No bytes, no I/O, no clock.

A *fragment* is a run of successive blocks of a prompt. What comes before it is on another store of the pool, or lost.
The law: **a block enters a tier only if its predecessor is in the same tier, in a slower one, or not here at all.** A
tier evicts from the ends of fragments, and never the last copy of a block that others follow. So each tier survives the
loss of the faster ones, and a prompt is given up from its end. Dropping a block drops all that follow it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.entry import Change, Entry, Holding, Tier
from halfmoon.catalog.eviction_order import EvictionOrder
from halfmoon.catalog.fragments import Fragments
from halfmoon.catalog.known_costs import KnownCosts
from halfmoon.catalog.tenant_accounts import TenantAccounts
from halfmoon.policy.eviction import EvictionPolicy, Usage

_FULL = 0.97  # share of a tier's budget above which blocks make room for others
_RETRY_S = 1.0  # delay until an expired block that others need is checked again
_SPARE_EXPIRIES = 1024  # of blocks that have left, or whose time has changed


class Catalog:
    """Owns what each entry holds. Reports changes to `on_change`."""

    def __init__(
        self, policies: Mapping[Tier, EvictionPolicy], on_change: Callable[[Change], None] = lambda change: None
    ) -> None:
        self.tenants = TenantAccounts()
        self.fragments = Fragments(policies)
        self._order = EvictionOrder(policies, self.fragments, self.tenants)
        self._latest_s = -math.inf  # the time, as callers last told it
        self._used_bytes = dict.fromkeys(policies, 0)
        self._num_held = dict.fromkeys(policies, 0)
        self._expiries: list[tuple[float, bytes]] = []
        self._costs = KnownCosts()
        self._on_change = on_change

    def __contains__(self, block: bytes | None) -> bool:
        return block in self.fragments

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self.fragments))

    def get(self, block: bytes) -> Entry | None:
        """The block's entry, expired or not."""
        return self.fragments.get(block)

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of all blocks in the tier."""
        return self._used_bytes.get(tier, 0)

    def num_blocks(self, tier: Tier) -> int:
        """Number of blocks in the tier."""
        return self._num_held.get(tier, 0)

    def is_in(self, block: bytes, tier: Tier) -> bool:
        """Whether the tier holds the block."""
        entry = self.fragments.get(block)
        return entry is not None and tier in entry.tiers

    def live(self, block: bytes, now_s: float) -> Entry | None:
        """The block's entry, unless it has expired."""
        self._latest_s = now_s
        entry = self.fragments.get(block)
        return None if entry is None or (entry.meta.expires_at_s <= now_s and not entry.pinned) else entry

    def match(self, blocks: Sequence[bytes], now_s: float) -> list[Entry]:
        """Entries of the leading blocks that are here. Counts as a use, last block first, so heads outlive tails."""
        entries = []
        for block in blocks:
            entry = self.live(block, now_s)
            if entry is None:
                break
            entries.append(entry)
        for entry in reversed(entries):
            self._touch(entry)
        return entries

    def find(self, blocks: Sequence[bytes], now_s: float) -> dict[int, Entry]:
        """Entries of all of the blocks that are here, by place, also behind gaps. Counts as a use, as in `match`."""
        live = ((place, self.live(block, now_s)) for place, block in enumerate(blocks))
        found = {place: entry for place, entry in live if entry is not None}
        for entry in reversed(found.values()):
            self._touch(entry)
        return found

    def can_add(self, parent: bytes | None, tier: Tier) -> bool:
        """Whether the law allows a block that follows `parent`, which may be elsewhere, in the tier."""
        entry = self.fragments.get(parent)
        return entry is None or max(entry.tiers) >= tier

    def can_begin(self, meta: BlockMeta) -> bool:
        """Whether the block is here, or can be added without coming before itself. Callers may name any parent."""
        return meta.id in self.fragments or not self.fragments.precedes(meta.id, meta.parent)

    def add(self, meta: BlockMeta, tier: Tier, num_bytes: int) -> None:
        """Adds a block to the tier as used now, replacing an earlier copy there. Requires `can_add` and `can_begin`."""
        assert self.can_add(meta.parent, tier), "a block would outlive its predecessor"
        assert self.can_begin(meta), "a block would come before itself"
        entry = self.fragments.get(meta.id)
        first = entry is None
        if entry is None:
            entry = Entry(meta, Usage(0, 0, meta.depth, meta.num_tokens, meta.recompute_s))
            self.fragments.add(entry)
        self._learn(entry, meta, first)
        if tier in entry.tiers:
            self._charge(entry, tier, -entry.tiers[tier].num_bytes)
        else:
            self._num_held[tier] += 1
            self._count_child(entry, tier, 1)
        self._charge(entry, tier, num_bytes)
        entry.tiers[tier] = Holding(num_bytes, ())
        self.tenants.charge(entry)
        self._touch(entry)
        self._order.offer(entry, tier)
        self._on_change(Change(entry.meta, tier, True, tuple(entry.tiers), first=first))

    def reject(self, meta: BlockMeta, tier: Tier) -> None:
        """Reports a copy that the tier has but does not admit: dropped, or it would outlive the one before."""
        tiers = tuple(self.fragments[meta.id].tiers) if meta.id in self.fragments else ()
        if tier not in tiers:
            self._on_change(Change(meta, tier, False, tiers, rejected=True))

    def touch(self, block: bytes) -> None:
        """Counts a use of the block if it is here."""
        entry = self.fragments.get(block)
        if entry is not None:
            self._touch(entry)

    def pop_victim(self, tier: Tier) -> bytes | None:
        """Removes and returns the block that the tier's policy ranks lowest; None if none may be evicted.

        Of several tenants' blocks see `fair_queue`.
        """
        entry = self._order.pop(tier)
        if entry is not None:
            self._leave(entry, tier, evicted=True)
        self._order.prune(tier, self._num_held[tier])
        return None if entry is None else entry.meta.id

    def room_idle_s(self, tier: Tier, budget_bytes: int, now_s: float) -> float:
        """How long the block was not used that `pop_victim` would take; inf if there is room, 0 if it may take none."""
        if self.used_bytes(tier) < _FULL * budget_bytes:
            return math.inf
        entry = self._order.lowest(tier)
        return 0.0 if entry is None else max(0.0, now_s - entry.used_s)

    def evict_of_tenant(self, tenant: str) -> bool:
        """Drops the tenant's longest unused block that no other follows, from every tier; False if there is none."""
        entry = self._order.pop_of_tenant(tenant)
        if entry is not None:
            for tier in sorted(entry.tiers):
                self._leave(entry, tier, evicted=True)
        self.tenants.prune(tenant, lambda candidate: candidate in self.fragments)
        return entry is not None

    def lose(self, block: bytes, tier: Tier) -> None:
        """Removes the tier's copy, which is damaged or missing. What follows the block stays: somebody may bring it."""
        entry = self.fragments.get(block)
        if entry is not None and tier in entry.tiers:
            self._leave(entry, tier)

    def drop(self, block: bytes) -> int:
        """Removes a block and all that follow it from every tier, even pinned and held ones; returns how many."""
        chain = self.fragments.descendants(block)
        for entry in reversed(chain):
            for tier in sorted(entry.tiers):
                self._leave(entry, tier)
        return len(chain)

    def expire(self, now_s: float) -> int:
        """Drops expired blocks unless a pinned or held block follows; returns how many were dropped."""
        self._latest_s = now_s
        num_dropped = 0
        while self._expiries and self._expiries[0][0] <= now_s:
            _, block = heapq.heappop(self._expiries)
            entry = self.fragments.get(block)
            if entry is None or entry.meta.expires_at_s > now_s:
                continue
            if any(follower.pinned or follower.num_holds for follower in self.fragments.descendants(block)):
                heapq.heappush(self._expiries, (now_s + _RETRY_S, block))
                continue
            num_dropped += self.drop(block)
        return num_dropped

    def pin(self, block: bytes, pinned: bool) -> bool:
        """Pins or unpins a block. A pinned block and all before it stay and do not expire. False if not here."""
        entry = self.fragments.get(block)
        if entry is None:
            return False
        entry.pinned = pinned
        for tier in entry.tiers:
            self._order.offer(entry, tier)
        return True

    def hold(self, block: bytes) -> None:
        """Pins the block while some work needs it. Holds are counted, and forgotten with the block."""
        self.fragments[block].num_holds += 1

    def release(self, block: bytes) -> None:
        """Ends one hold."""
        entry = self.fragments.get(block)
        if entry is not None and entry.num_holds:
            entry.num_holds -= 1

    def _touch(self, entry: Entry) -> None:
        entry.used_s = self._latest_s
        self._order.touch(entry)

    def _learn(self, entry: Entry, meta: BlockMeta, first: bool) -> None:
        """Merges what a later copy of a block knows better than an earlier one."""
        if first or not entry.meta.recompute_s:
            self._costs.note(meta)
        tenant = entry.meta.tenant
        entry.meta = replace(
            meta,
            parent=entry.meta.parent,
            layout=meta.layout or entry.meta.layout,
            recompute_s=meta.recompute_s or entry.meta.recompute_s,
            tenant=tenant or meta.tenant,
        )
        if entry.meta.tenant != tenant:
            self._reassign(entry, tenant)
        entry.usage.recompute_s, entry.usage.num_tokens = self._costs.recompute_s(entry.meta), entry.meta.num_tokens
        if meta.expires_at_s < math.inf:
            heapq.heappush(self._expiries, (meta.expires_at_s, meta.id))
            if len(self._expiries) > 2 * len(self.fragments) + _SPARE_EXPIRIES:
                self._prune_expiries()

    def _prune_expiries(self) -> None:
        """Forgets the times of blocks that left in another way, once they are most of them."""
        times = ((entry.meta.expires_at_s, entry.meta.id) for entry in self.fragments)
        self._expiries = [(expires_at_s, block) for expires_at_s, block in times if expires_at_s < math.inf]
        heapq.heapify(self._expiries)

    def _reassign(self, entry: Entry, tenant: str) -> None:
        """Moves a block from `tenant` to its own, which a listing of the cold tier could not tell."""
        for tier, holding in entry.tiers.items():
            self._order.charge(tenant, tier, -holding.num_bytes)
            self._order.charge(entry.meta.tenant, tier, holding.num_bytes)
        self.tenants.move(entry, tenant)
        self.tenants.charge(entry)
        for tier in entry.tiers:
            self._order.offer(entry, tier)

    def _charge(self, entry: Entry, tier: Tier, num_bytes: int) -> None:
        self._used_bytes[tier] += num_bytes
        self._order.charge(entry.meta.tenant, tier, num_bytes)

    def _leave(self, entry: Entry, tier: Tier, evicted: bool = False) -> None:
        holding = entry.tiers.pop(tier)
        self._charge(entry, tier, -holding.num_bytes)
        self.tenants.charge(entry)
        self._num_held[tier] -= 1
        self._count_child(entry, tier, -1)
        if not entry.tiers:
            self.fragments.remove(entry)
            parent = self.fragments.parent(entry)
            if parent is not None:
                self.tenants.offer(parent)
        self._on_change(Change(entry.meta, tier, False, tuple(entry.tiers), evicted=evicted))

    def _count_child(self, entry: Entry, tier: Tier, by: int) -> None:
        parent = self.fragments.parent(entry)
        if parent is not None:
            parent.num_children_in[tier] += by
            if tier in parent.tiers:
                self._order.offer(parent, tier)

    def check_integrity(self) -> None:
        """Asserts the law and the counts. For tests; walks over everything."""
        for tier in self._num_held:
            held = [entry for entry in self.fragments if tier in entry.tiers]
            assert self._num_held[tier] == len(held)
            assert self._used_bytes[tier] == sum(entry.tiers[tier].num_bytes for entry in held)
            for tenant in {entry.meta.tenant for entry in held}:
                own = [entry.tiers[tier].num_bytes for entry in held if entry.meta.tenant == tenant]
                assert self._order.used_bytes(tenant, tier) == sum(own)
        for account in self.tenants:
            own = [_largest(entry) for entry in self.fragments if entry.meta.tenant == account.tenant]
            assert (account.num_blocks, account.used_bytes) == (len(own), sum(own))
        assert all(entry.tiers for entry in self.fragments)
        self.fragments.check_integrity()


def _largest(entry: Entry) -> int:
    return max(holding.num_bytes for holding in entry.tiers.values())
