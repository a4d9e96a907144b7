"""Which block goes next, from each tier and of each tenant, by the tiers' policies. No bytes, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from halfmoon.catalog.entry import Entry, Tier
from halfmoon.catalog.fair_queue import FairQueue
from halfmoon.catalog.fragments import Fragments
from halfmoon.catalog.tenant_accounts import TenantAccounts
from halfmoon.policy.eviction import EvictionPolicy
from halfmoon.policy.eviction_queue import Evaluation


class EvictionOrder:
    """Owns the ranks of all holdings, each tier's candidates, and the number of uses. Removes no block itself.

    A candidate is offered when it may go as far as is known then, and judged again when its turn comes.
    """

    def __init__(self, policies: Mapping[Tier, EvictionPolicy], fragments: Fragments, tenants: TenantAccounts) -> None:
        self._policies = policies
        self._queues = {tier: FairQueue() for tier in policies}
        self._fragments = fragments
        self._tenants = tenants
        self._num_uses = 0

    def touch(self, entry: Entry) -> None:
        """Counts a use of the block and ranks it anew."""
        self._num_uses += 1
        entry.usage.last_used = self._num_uses
        entry.usage.num_uses += 1
        for tier, holding in entry.tiers.items():
            holding.rank = self._policies[tier].rank(entry.usage, holding.num_bytes)

    def charge(self, tenant: str, tier: Tier, num_bytes: int) -> None:
        """Adds bytes that the tenant has in the tier; negative ones are those that left."""
        self._queues[tier].charge(tenant, num_bytes)

    def used_bytes(self, tenant: str, tier: Tier) -> int:
        """Bytes that the tenant has in the tier."""
        return self._queues[tier].used_bytes(tenant)

    def offer(self, entry: Entry, tier: Tier) -> None:
        """Adds a block that may make room in the tier if no block there follows it."""
        if not entry.num_children_in[tier] and not entry.pinned:
            self._queues[tier].offer(entry.meta.tenant, entry.meta.id, entry.tiers[tier].rank)
            self._tenants.offer(entry)

    def pop(self, tier: Tier) -> Entry | None:
        """Takes the block that the tier's policy ranks lowest out of the order; None if none may go."""
        block = self._queues[tier].pop(*self._judges(tier))
        if block is None:
            return None
        entry = self._fragments[block]
        self._policies[tier].evicted(entry.tiers[tier].rank)
        return entry

    def prune(self, tier: Tier, num_held: int) -> None:
        """Forgets candidates that left the tier in another way, once they are most of them."""
        self._queues[tier].prune(lambda block: self._entry_in(block, tier) is not None, num_held)

    def lowest(self, tier: Tier) -> Entry | None:
        """The block that `pop` would take."""
        block = self._queues[tier].lowest(*self._judges(tier))
        return None if block is None else self._fragments[block]

    def pop_of_tenant(self, tenant: str) -> Entry | None:
        """Takes the tenant's longest unused block that no other follows; None if it has none."""
        block = self._tenants.pop_oldest(tenant, lambda candidate: self._evaluate_own(candidate, tenant))
        return None if block is None else self._fragments[block]

    def _judges(
        self, tier: Tier
    ) -> tuple[Callable[[str, bytes], Evaluation], Callable[[bytes], int], Callable[[str], bool]]:
        """How `FairQueue` finds the tier's next victim."""
        return (
            lambda tenant, candidate: self._evaluate(candidate, tier, tenant),
            lambda candidate: self._num_uses - self._fragments[candidate].usage.last_used,
            self._tenants.is_over,
        )

    def _entry_in(self, block: bytes, tier: Tier) -> Entry | None:
        entry = self._fragments.get(block)
        return entry if entry is not None and tier in entry.tiers else None

    def _evaluate(self, block: bytes, tier: Tier, tenant: str) -> Evaluation:
        entry = self._entry_in(block, tier)
        if entry is None or entry.num_children_in[tier] or entry.pinned or entry.meta.tenant != tenant:
            return "kept"
        return "blocked" if entry.num_holds or entry.is_needed_in(tier) else entry.tiers[tier].rank

    def _evaluate_own(self, block: bytes, tenant: str) -> Evaluation:
        entry = self._fragments.get(block)
        if entry is None or entry.meta.tenant != tenant or entry.children or entry.pinned:
            return "kept"
        return "blocked" if entry.num_holds else (entry.usage.last_used,)
