"""Fair shares among tenants whose requests wait in the same class: virtual token counters. Pure.

The counters are those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant's counter
grows by the tokens that its requests cost, and whose counter is smallest goes first. They are applied by start tags
(Goyal et al., "Start-time Fair Queuing", 1996): a request carries its tenant's counter as of its arrival in its
priority, so that workers, forecasts and the simulator need to know nothing of tenants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from halfmoon.policy.admission.tenant_room import TenantRoom
from halfmoon.policy.admission.tenants import Tenant

_OUTPUT_WEIGHT = 2.0  # of an output token, as in the paper; a prompt token weighs 1
_STEP = 2_048  # in requests no further apart than this the client's own priority, then arrival, decides
_MAX_TAG = (1 << 36) - 1
_PRIORITIES = 1_000  # that a client may choose from
_FEW_TENANTS = 1_024


def token_cost(num_prompt: int, num_output: float) -> float:
    """What a request costs its tenant."""
    return num_prompt + _OUTPUT_WEIGHT * num_output


def queue_priority(class_priority: int, tag: float, requested: int) -> int:
    """The priority at the workers: by class first, then by tag, then as the client requested. Fits into 64 bits."""
    half = _PRIORITIES // 2
    step = min(int(tag) // _STEP, _MAX_TAG)
    return (class_priority * (_MAX_TAG + 1) + step) * _PRIORITIES + max(-half, min(requested, half - 1))


class _Charge(NamedTuple):
    """What one request was charged."""

    class_priority: int
    tenant: Tenant
    tag: float
    cost: float
    num_tokens: int  # of room


@dataclass(slots=True)
class _Queue:
    """The requests of one class priority."""

    begun_tag: float = 0.0  # largest tag of a request that has begun: where tenants without requests waiting stand
    counters: dict[str, float] = field(default_factory=dict)  # by tenant: the tag of its next request

    def tag(self, name: str) -> float:
        """A tenant that had nothing waiting is lifted to where the others are: idle time earns no credit."""
        return max(self.begun_tag, self.counters.get(name, 0.0))

    def forget_idle(self) -> None:
        """Drops counters that no longer matter."""
        self.counters = {name: tag for name, tag in self.counters.items() if tag > self.begun_tag}


class FairShares:
    """Owns the counters of all tenants, by class priority: classes of one priority share. Owns their room, too.

    Off, every request has tag 0, and nothing is counted. Shares are in proportion to the tenants' weights. Tags of
    several gateways cannot be compared: where there are several, only room is shared.
    """

    def __init__(self, *, has_tags: bool = True) -> None:
        self._has_tags = has_tags
        self.is_on = False  # where there are several tenants
        self._queues: dict[int, _Queue] = {}
        self._rooms: dict[int, TenantRoom] = {}
        self._charges: dict[str, _Charge] = {}  # of requests inside
        self._begun: set[str] = set()  # of these
        self._roomless: set[str] = set()  # of these: workers refused them, and they have not been sent to others

    def priority(self, class_priority: int, tenant: Tenant, requested: int) -> int:
        """The priority of a request if it came now."""
        queue = self._queues.get(class_priority) if self.is_on and self._has_tags else None
        return queue_priority(class_priority, queue.tag(tenant.name) if queue else 0.0, requested)

    def may_enter(self, class_priority: int, tenant: Tenant, num_tokens: int, now_s: float) -> bool:
        """Whether there is room for the request that others of the class do not have a better right to."""
        if not self.is_on:
            return True
        return self._rooms.setdefault(class_priority, TenantRoom()).may_use(tenant, num_tokens, now_s)

    def note_full(self, request_id: str, now_s: float) -> bool:
        """Notes that a request inside found no room on any worker: it has none until it is sent to workers again.

        Returns whether it may be: others of the class have no better right to the room. Where there are several
        gateways it keeps what it has, and may: the room that one of them has varies down to none at all.
        """
        charge = self._charges.get(request_id)
        if charge is None:
            return True
        room = self._rooms[charge.class_priority]
        if not self._has_tags:
            room.note_full(charge.num_tokens, now_s)
            return True
        self.send(request_id)
        self._roomless.add(request_id)
        return room.wait(charge.tenant, charge.num_tokens, now_s)

    def send(self, request_id: str) -> None:
        """Notes that a request is sent to workers."""
        if request_id in self._roomless:
            self._roomless.discard(request_id)
            charge = self._charges[request_id]
            self._rooms[charge.class_priority].end_wait(charge.tenant, charge.num_tokens)

    def enter(self, request_id: str, class_priority: int, tenant: Tenant, cost: float, num_tokens: int) -> None:
        """Charges the tenant with what a request is expected to cost. Does nothing if it is inside already."""
        if not self.is_on or request_id in self._charges:
            return
        queue = self._queues.setdefault(class_priority, _Queue())
        if len(queue.counters) >= _FEW_TENANTS:
            queue.forget_idle()
        charge = _Charge(class_priority, tenant, queue.tag(tenant.name), cost, num_tokens)
        self._charges[request_id] = charge
        queue.counters[tenant.name] = charge.tag + cost / tenant.weight
        self._rooms.setdefault(class_priority, TenantRoom()).take(tenant, num_tokens)

    def begin(self, request_id: str) -> None:
        """Notes that a request no longer waits."""
        charge = self._charges.get(request_id)
        if charge is not None:
            self._begun.add(request_id)
            queue = self._queues[charge.class_priority]
            queue.begun_tag = max(queue.begun_tag, charge.tag)

    def leave(self, request_id: str, cost: float) -> None:
        """Corrects what a request that has ended was charged to what it did cost: nothing if it never began."""
        self.send(request_id)
        charge = self._charges.pop(request_id, None)
        has_begun = request_id in self._begun
        self._begun.discard(request_id)
        if charge is not None:
            counters, name = self._queues[charge.class_priority].counters, charge.tenant.name
            self._rooms[charge.class_priority].give_back(charge.tenant, charge.num_tokens)
            if name in counters:
                counters[name] += ((cost if has_begun else 0.0) - charge.cost) / charge.tenant.weight
