"""Eviction candidates of one tier by tenant, so that a tenant that brings much pushes out its own blocks first.

Each tenant's blocks are ranked by the tier's policy. Which tenant gives one up: one above its quota, else the one whose
lowest-ranked block has the greatest (uses of the store since it was used) x (bytes that the tenant has in the tier). So
with ten times the bytes, a block goes ten times as early; and what nobody uses goes in the end, however small. One
tenant alone gets the policy itself. Of very many tenants a few at a time are compared, in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from halfmoon.policy.eviction import Rank
from halfmoon.policy.eviction_queue import Evaluation, EvictionQueue

_COMPARED = 32  # tenants


class FairQueue:
    """Owns the candidates, and how many bytes each tenant has in the tier."""

    def __init__(self) -> None:
        self._queues: dict[str, EvictionQueue] = {}
        self._used_bytes: dict[str, int] = {}
        self._turn = 0

    def charge(self, tenant: str, num_bytes: int) -> None:
        """Adds bytes that the tenant has here; negative ones are those that left."""
        used_bytes = self._used_bytes.get(tenant, 0) + num_bytes
        if used_bytes:
            self._used_bytes[tenant] = used_bytes
        else:
            self._used_bytes.pop(tenant, None)
            self._queues.pop(tenant, None)

    def used_bytes(self, tenant: str) -> int:
        """Bytes that the tenant has here."""
        return self._used_bytes.get(tenant, 0)

    def offer(self, tenant: str, block: bytes, rank: Rank) -> None:
        """Adds a block that may be evicted now, as far as the caller can see."""
        self._queues.setdefault(tenant, EvictionQueue()).offer(block, rank)

    def pop(
        self,
        evaluate: Callable[[str, bytes], Evaluation],
        age: Callable[[bytes], int],
        is_over: Callable[[str], bool],
    ) -> bytes | None:
        """Removes and returns the block to evict; None if none may be.

        evaluate: of a tenant's block; a block that is another's by now is `kept`. age: uses of the store since the
        block was used. is_over: whether a tenant is above its quota.
        """
        tenant = self._next(evaluate, age, is_over)
        if tenant is None:
            return None
        self._turn += _COMPARED if len(self._queues) > _COMPARED else 0
        return self._queues[tenant].pop(partial(evaluate, tenant))

    def lowest(
        self,
        evaluate: Callable[[str, bytes], Evaluation],
        age: Callable[[bytes], int],
        is_over: Callable[[str], bool],
    ) -> bytes | None:
        """The block that `pop` would return; it stays."""
        tenant = self._next(evaluate, age, is_over)
        return None if tenant is None else self._queues[tenant].lowest(partial(evaluate, tenant))

    def _next(
        self,
        evaluate: Callable[[str, bytes], Evaluation],
        age: Callable[[bytes], int],
        is_over: Callable[[str], bool],
    ) -> str | None:
        """The tenant that gives a block up."""
        tenants = list(self._queues)
        for start in range(0, len(tenants), _COMPARED):
            victims = []
            for number in range(start, min(start + _COMPARED, len(tenants))):
                tenant = tenants[(self._turn + number) % len(tenants)]
                block = self._queues[tenant].lowest(partial(evaluate, tenant))
                if block is not None:
                    victims.append((is_over(tenant), self.used_bytes(tenant) * age(block), tenant))
            if victims:
                return max(victims)[2]
        return None

    def prune(self, is_held: Callable[[bytes], bool], num_held: int) -> None:
        """Forgets entries of blocks that left in another way, once they are most of a queue."""
        for queue in self._queues.values():
            queue.prune(is_held, num_held)
