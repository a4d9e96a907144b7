"""Whom a full cluster refuses: room that tenants wanted in vain is kept for them, up to their fair share. Pure.

A full cluster refuses whoever comes while no place is free, so that who comes ten times as often gets ten times as
much. Here a tenant above its share waits for those below it, as far as they want more, and only while room is short.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.policy.admission.tenants import Tenant

_MEMORY_S = 30.0  # how long a demand, or want of room, counts after it was last seen


@dataclass(slots=True)
class _Use:
    """What one tenant has and wanted, in tokens."""

    weight: float
    used: int = 0
    waiting: int = 0  # of requests that found no room and may come again
    wanted: int = 0  # most that it had or asked for lately
    wanted_s: float = 0.0  # when
    latest: int = 1  # the latest request


class TenantRoom:
    """Owns what each tenant holds and lately wanted, and how much room there was when it ran out."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}
        self._total = 0
        self._capacity = 0  # least that was inside when a request found no room lately
        self._measured_s = self._full_s = float("-inf")

    def note_full(self, num_tokens: int, now_s: float) -> None:
        """Notes that a request of `num_tokens`, which it holds already, found no room on any worker."""
        held, self._full_s = self._total - num_tokens, now_s
        if held < self._capacity or now_s - self._measured_s > _MEMORY_S:
            self._capacity, self._measured_s = held, now_s

    def may_use(self, tenant: Tenant, num_tokens: int, now_s: float) -> bool:
        """Whether the tenant may have `num_tokens` more. Counts as its demand in either case."""
        use = self._uses.setdefault(tenant.name, _Use(tenant.weight))
        use.weight, use.latest = tenant.weight, max(num_tokens, 1)
        wanted = use.used + use.waiting + num_tokens
        if wanted >= use.wanted or now_s - use.wanted_s > _MEMORY_S:
            use.wanted, use.wanted_s = wanted, now_s
        if now_s - self._full_s > _MEMORY_S:
            return True
        self._forget(now_s)
        total_weight = sum(one.weight for one in self._uses.values())
        if use.used + num_tokens <= self._capacity * use.weight / total_weight:
            return True
        kept = 0.0
        for other in self._uses.values():
            if other is not use:
                share = self._capacity * other.weight / total_weight
                left = max(0.0, min(other.wanted, share) - other.used)
                kept += left // other.latest * other.latest  # less than a request is of no use to it
        return self._total + num_tokens + kept <= self._capacity or not kept

    def take(self, tenant: Tenant, num_tokens: int) -> None:
        """Adds the tokens of a request that was admitted."""
        self._uses.setdefault(tenant.name, _Use(tenant.weight)).used += num_tokens
        self._total += num_tokens

    def give_back(self, tenant: Tenant, num_tokens: int) -> None:
        """Returns the tokens of a request that has ended."""
        self._uses[tenant.name].used -= num_tokens
        self._total -= num_tokens

    def wait(self, tenant: Tenant, num_tokens: int, now_s: float) -> bool:
        """Takes the tokens of a request that found no room on any worker and still wants some. Whether it may."""
        self.note_full(num_tokens, now_s)
        self.give_back(tenant, num_tokens)
        may_use = self.may_use(tenant, num_tokens, now_s)
        self._uses[tenant.name].waiting += num_tokens
        return may_use

    def end_wait(self, tenant: Tenant, num_tokens: int) -> None:
        """Gives the tokens of a request back that waited."""
        self._uses[tenant.name].waiting -= num_tokens
        self.take(tenant, num_tokens)

    def _forget(self, now_s: float) -> None:
        """Drops tenants that have nothing and wanted nothing lately."""
        self._uses = {
            name: use
            for name, use in self._uses.items()
            if use.used or use.waiting or now_s - use.wanted_s <= _MEMORY_S
        }
