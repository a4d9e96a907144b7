"""What each tenant holds in all tiers together, against its quota. No I/O, no clock.

A block counts once, with its largest copy, for the tenant that brought it. Above the quota the tenant's own blocks make
room, the longest unused first and prompts from their ends, in every tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from halfmoon.catalog.entry import Entry
from halfmoon.kv.owner import KVOwner
from halfmoon.policy.eviction_queue import Evaluation, EvictionQueue

_MAX_EMPTY = 4096  # tenants that are remembered for their quota alone


@dataclass(slots=True)
class TenantAccount:
    """One tenant. Only `TenantAccounts` changes it."""

    tenant: str
    num_blocks: int = 0
    used_bytes: int = 0
    quota_bytes: int = 0  # as the latest put said; 0: no limit
    num_evicted: int = 0  # blocks dropped to stay within the quota
    queue: EvictionQueue = field(default_factory=EvictionQueue)


class TenantAccounts:
    """Owns the accounts."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}

    def __iter__(self) -> Iterator[TenantAccount]:
        """Those that hold blocks, the largest first. May be read on any thread, so it starts with a copy."""
        held = [account for account in list(self._accounts.values()) if account.num_blocks]
        return iter(sorted(held, key=lambda account: (-account.used_bytes, account.tenant)))

    def set_quota(self, owner: KVOwner) -> None:
        """Learns a tenant's present quota."""
        if len(self._accounts) > _MAX_EMPTY and owner.tenant not in self._accounts:
            self._accounts = {tenant: account for tenant, account in self._accounts.items() if account.num_blocks}
        self._account(owner.tenant).quota_bytes = owner.quota_bytes

    def excess_bytes(self, tenant: str, more_bytes: int = 0) -> int:
        """Bytes above the quota, if `more_bytes` came; 0 if it has none."""
        account = self._accounts.get(tenant)
        if account is None or not account.quota_bytes:
            return 0
        return max(0, account.used_bytes + more_bytes - account.quota_bytes)

    def is_over(self, tenant: str) -> bool:
        """Whether the tenant is above its quota."""
        return self.excess_bytes(tenant) > 0

    def charge(self, entry: Entry) -> None:
        """Follows a change of the entry's tiers."""
        num_bytes = max((holding.num_bytes for holding in entry.tiers.values()), default=0)
        self._charge(entry.meta.tenant, num_bytes - entry.charged_bytes, bool(num_bytes) - bool(entry.charged_bytes))
        entry.charged_bytes = num_bytes

    def move(self, entry: Entry, tenant: str) -> None:
        """Moves the entry from `tenant` to the one that it belongs to, as has turned out."""
        self._charge(tenant, -entry.charged_bytes, -bool(entry.charged_bytes))
        entry.charged_bytes = 0

    def offer(self, entry: Entry) -> None:
        """Adds a block that may make room for its tenant if no block follows it."""
        if not entry.children and not entry.pinned:
            self._account(entry.meta.tenant).queue.offer(entry.meta.id, (entry.usage.last_used,))

    def pop_oldest(self, tenant: str, evaluate: Callable[[bytes], Evaluation]) -> bytes | None:
        """Removes and returns the block that makes room for its tenant; None if none may."""
        account = self._account(tenant)
        block = account.queue.pop(evaluate)
        account.num_evicted += block is not None
        return block

    def prune(self, tenant: str, is_held: Callable[[bytes], bool]) -> None:
        """Forgets candidates that left in another way, once they are most of them."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.queue.prune(is_held, account.num_blocks)

    def _charge(self, tenant: str, num_bytes: int, num_blocks: int) -> None:
        account = self._account(tenant)
        account.used_bytes += num_bytes
        account.num_blocks += num_blocks

    def _account(self, tenant: str) -> TenantAccount:
        return self._accounts.setdefault(tenant, TenantAccount(tenant))
