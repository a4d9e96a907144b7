"""Which block is in which tier, the order of eviction, and the law of prefixes. No bytes, no I/O, no clock.

The law: **the predecessor of every block is held in the same tier or in a slower one.** So each tier survives the loss
of the faster ones as a set of whole prefixes. It follows that a tier evicts from the ends of prompts, and never the
last copy of a block that others follow. Dropping a block drops all that follow it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.catalog.entry import Change, Entry, Holding, Tier
from services.kvstore.catalog.eviction import EvictionPolicy, Usage
from services.kvstore.catalog.eviction_queue import Evaluation
from services.kvstore.catalog.fair_queue import FairQueue
from services.kvstore.catalog.known_costs import KnownCosts
from services.kvstore.catalog.tenant_accounts import TenantAccounts

_RETRY_S = 1.0  # delay until an expired block that others need is checked again


class Catalog:
    """Owns every entry and the order of eviction in each tier. Reports changes to `on_change`."""

    def __init__(
        self, policies: Mapping[Tier, EvictionPolicy], on_change: Callable[[Change], None] = lambda change: None
    ) -> None:
        self._policies = policies
        self._queues = {tier: FairQueue() for tier in policies}
        self.tenants = TenantAccounts()
        self._entries: dict[bytes, Entry] = {}
        self._used_bytes = dict.fromkeys(policies, 0)
        self._num_held = dict.fromkeys(policies, 0)
        self._expiries: list[tuple[float, bytes]] = []
        self._num_uses = 0
        self._costs = KnownCosts()
        self._on_change = on_change

    def __contains__(self, block: bytes) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, block: bytes) -> Entry | None:
        """The block's entry, expired or not."""
        return self._entries.get(block)

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of all blocks in the tier."""
        return self._used_bytes.get(tier, 0)

    def num_blocks(self, tier: Tier) -> int:
        """Number of blocks in the tier."""
        return self._num_held.get(tier, 0)

    def is_in(self, block: bytes, tier: Tier) -> bool:
        """Whether the tier holds the block."""
        entry = self._entries.get(block)
        return entry is not None and tier in entry.tiers

    def live(self, block: bytes, now_s: float) -> Entry | None:
        """The block's entry, unless it has expired."""
        entry = self._entries.get(block)
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

    def goes_on(self, block: bytes, num_blocks: int) -> bool:
        """Whether some prompt has at least `num_blocks` known blocks after this one."""
        entry = self._entries.get(block)
        if entry is None or num_blocks == 0:
            return entry is not None
        return any(self.goes_on(child, num_blocks - 1) for child in entry.children)

    def before(self, block: bytes, num_blocks: int) -> bytes | None:
        """The block `num_blocks` before this one in its prompt; None if there is none."""
        ancestor: bytes | None = block
        for _ in range(num_blocks):
            entry = self._entries.get(ancestor) if ancestor is not None else None
            ancestor = None if entry is None else entry.meta.parent
        return ancestor

    def can_add(self, parent: bytes | None, tier: Tier) -> bool:
        """Whether the law allows a block that follows `parent` in the tier."""
        if parent is None:
            return True
        entry = self._entries.get(parent)
        return entry is not None and max(entry.tiers) >= tier

    def add(self, meta: BlockMeta, tier: Tier, num_bytes: int) -> None:
        """Adds a block to the tier as used now, replacing an earlier copy there. Requires `can_add`."""
        assert self.can_add(meta.parent, tier), "a block without its predecessor"
        entry = self._entries.get(meta.id)
        first = entry is None
        if entry is None:
            entry = self._entries[meta.id] = Entry(meta, Usage(0, 0, meta.depth, meta.num_tokens, meta.recompute_s))
            if meta.parent is not None:
                self._entries[meta.parent].children.add(meta.id)
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
        self._offer(entry, tier)
        self._on_change(Change(entry.meta, tier, True, tuple(entry.tiers), first=first))

    def reject(self, meta: BlockMeta, tier: Tier) -> None:
        """Reports a copy that the tier has but does not admit: the block was dropped or its predecessor is missing."""
        tiers = tuple(self._entries[meta.id].tiers) if meta.id in self._entries else ()
        if tier not in tiers:
            self._on_change(Change(meta, tier, False, tiers, rejected=True))

    def touch(self, block: bytes) -> None:
        """Counts a use of the block if it is here."""
        entry = self._entries.get(block)
        if entry is not None:
            self._touch(entry)

    def pop_victim(self, tier: Tier) -> bytes | None:
        """Removes and returns the block that the tier's policy ranks lowest; None if none may be evicted.

        Of several tenants' blocks see `fair_queue`.
        """
        queue = self._queues[tier]
        block = queue.pop(
            lambda tenant, candidate: self._evaluate(candidate, tier, tenant),
            lambda candidate: self._num_uses - self._entries[candidate].usage.last_used,
            self.tenants.is_over,
        )
        if block is not None:
            entry = self._entries[block]
            self._policies[tier].evicted(entry.tiers[tier].rank)
            self._leave(entry, tier, evicted=True)
        queue.prune(lambda candidate: self.is_in(candidate, tier), self._num_held[tier])
        return block

    def evict_of_tenant(self, tenant: str) -> bool:
        """Drops the tenant's longest unused block that no other follows, from every tier; False if there is none."""
        block = self.tenants.pop_oldest(tenant, lambda candidate: self._evaluate_own(candidate, tenant))
        if block is not None:
            entry = self._entries[block]
            for tier in sorted(entry.tiers):
                self._leave(entry, tier, evicted=True)
        self.tenants.prune(tenant, lambda candidate: candidate in self._entries)
        return block is not None

    def lose(self, block: bytes, tier: Tier) -> None:
        """Removes the tier's copy, which is damaged or missing, and the blocks that depended on it alone."""
        entry = self._entries.get(block)
        if entry is None or tier not in entry.tiers:
            return
        for child in self._unsupported_without(entry, tier):
            self.drop(child)
        self._leave(entry, tier)

    def drop(self, block: bytes) -> int:
        """Removes a block and all that follow it from every tier, even pinned and held ones; returns how many."""
        chain = self._descendants(block)
        for entry in reversed(chain):
            for tier in sorted(entry.tiers):
                self._leave(entry, tier)
        return len(chain)

    def expire(self, now_s: float) -> int:
        """Drops expired blocks unless a pinned or held block follows; returns how many were dropped."""
        num_dropped = 0
        while self._expiries and self._expiries[0][0] <= now_s:
            _, block = heapq.heappop(self._expiries)
            entry = self._entries.get(block)
            if entry is None or entry.meta.expires_at_s > now_s:
                continue
            if any(follower.pinned or follower.num_holds for follower in self._descendants(block)):
                heapq.heappush(self._expiries, (now_s + _RETRY_S, block))
                continue
            num_dropped += self.drop(block)
        return num_dropped

    def pin(self, block: bytes, pinned: bool) -> bool:
        """Pins or unpins a block. A pinned block and all before it stay and do not expire. False if not here."""
        entry = self._entries.get(block)
        if entry is None:
            return False
        entry.pinned = pinned
        for tier in entry.tiers:
            self._offer(entry, tier)
        return True

    def hold(self, block: bytes) -> None:
        """Pins the block while some work needs it. Holds are counted, and forgotten with the block."""
        self._entries[block].num_holds += 1

    def release(self, block: bytes) -> None:
        """Ends one hold."""
        entry = self._entries.get(block)
        if entry is not None and entry.num_holds:
            entry.num_holds -= 1

    def _touch(self, entry: Entry) -> None:
        self._num_uses += 1
        entry.usage.last_used = self._num_uses
        entry.usage.num_uses += 1
        for tier, holding in entry.tiers.items():
            holding.rank = self._policies[tier].rank(entry.usage, holding.num_bytes)

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

    def _reassign(self, entry: Entry, tenant: str) -> None:
        """Moves a block from `tenant` to its own, which a listing of the cold tier could not tell."""
        for tier, holding in entry.tiers.items():
            self._queues[tier].charge(tenant, -holding.num_bytes)
            self._queues[tier].charge(entry.meta.tenant, holding.num_bytes)
        self.tenants.move(entry, tenant)
        self.tenants.charge(entry)
        for tier in entry.tiers:
            self._offer(entry, tier)

    def _charge(self, entry: Entry, tier: Tier, num_bytes: int) -> None:
        self._used_bytes[tier] += num_bytes
        self._queues[tier].charge(entry.meta.tenant, num_bytes)

    def _offer(self, entry: Entry, tier: Tier) -> None:
        if not entry.num_children_in[tier] and not entry.pinned:
            self._queues[tier].offer(entry.meta.tenant, entry.meta.id, entry.tiers[tier].rank)
            self.tenants.offer(entry)

    def _evaluate_own(self, block: bytes, tenant: str) -> Evaluation:
        entry = self._entries.get(block)
        if entry is None or entry.meta.tenant != tenant or entry.children or entry.pinned:
            return "kept"
        return "blocked" if entry.num_holds else (entry.usage.last_used,)

    def _evaluate(self, block: bytes, tier: Tier, tenant: str) -> Evaluation:
        entry = self._entries.get(block)
        if entry is None or tier not in entry.tiers or entry.num_children_in[tier] or entry.pinned:
            return "kept"
        if entry.meta.tenant != tenant:
            return "kept"
        return "blocked" if entry.num_holds or self._supports_alone(entry, tier) else entry.tiers[tier].rank

    def _supports_alone(self, entry: Entry, tier: Tier) -> bool:
        """Whether blocks in faster tiers depend on this copy alone."""
        others = [other for other in entry.tiers if other != tier]
        slowest = max(others, default=-1)
        return any(num and slowest < child for child, num in entry.num_children_in.items() if child <= tier)

    def _unsupported_without(self, entry: Entry, tier: Tier) -> list[bytes]:
        slowest = max((other for other in entry.tiers if other != tier), default=-1)
        return [child for child in entry.children if max(self._entries[child].tiers) > slowest]

    def _leave(self, entry: Entry, tier: Tier, evicted: bool = False) -> None:
        holding = entry.tiers.pop(tier)
        self._charge(entry, tier, -holding.num_bytes)
        self.tenants.charge(entry)
        self._num_held[tier] -= 1
        self._count_child(entry, tier, -1)
        if not entry.tiers:
            assert not entry.children, "a block without its predecessor"
            del self._entries[entry.meta.id]
            if entry.meta.parent is not None:
                parent = self._entries[entry.meta.parent]
                parent.children.discard(entry.meta.id)
                self.tenants.offer(parent)
        self._on_change(Change(entry.meta, tier, False, tuple(entry.tiers), evicted=evicted))

    def _count_child(self, entry: Entry, tier: Tier, by: int) -> None:
        parent = self._entries.get(entry.meta.parent or b"")
        if parent is not None:
            parent.num_children_in[tier] += by
            if tier in parent.tiers:
                self._offer(parent, tier)

    def _descendants(self, block: bytes) -> list[Entry]:
        """Entries of the block and all that follow it, each after its parent."""
        entries: list[Entry] = []
        todo: list[bytes] = [block] if block in self._entries else []
        while todo:
            entry = self._entries[todo.pop()]
            entries.append(entry)
            todo.extend(entry.children)
        return entries

    def check_integrity(self) -> None:
        """Asserts the law and the counts. For tests; walks over everything."""
        for tier in self._policies:
            held = [entry for entry in self._entries.values() if tier in entry.tiers]
            assert self._num_held[tier] == len(held)
            assert self._used_bytes[tier] == sum(entry.tiers[tier].num_bytes for entry in held)
            for tenant in {entry.meta.tenant for entry in held}:
                own = [entry.tiers[tier].num_bytes for entry in held if entry.meta.tenant == tenant]
                assert self._queues[tier].used_bytes(tenant) == sum(own)
        for account in self.tenants:
            own = [_largest(entry) for entry in self._entries.values() if entry.meta.tenant == account.tenant]
            assert (account.num_blocks, account.used_bytes) == (len(own), sum(own))
        for block, entry in self._entries.items():
            assert entry.tiers
            assert all(self._entries[child].meta.parent == block for child in entry.children)
            for tier in Tier:
                assert entry.num_children_in[tier] == _count(self._entries, entry.children, tier)
            if entry.meta.parent is not None:
                assert max(self._entries[entry.meta.parent].tiers) >= max(entry.tiers)
                assert block in self._entries[entry.meta.parent].children


def _count(entries: Mapping[bytes, Entry], children: Iterable[bytes], tier: Tier) -> int:
    return sum(tier in entries[child].tiers for child in children)


def _largest(entry: Entry) -> int:
    return max(holding.num_bytes for holding in entry.tiers.values())
