"""A request that no connection waits for: a background response, or a line of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.tenants import Tenant

OnEvents = Callable[[Sequence[dict[str, Any]]], None]
"""Takes the next events of a response, in the order of a stream."""


@dataclass(frozen=True, slots=True)
class DetachedRequest:
    """What to run, and for whom."""

    request_id: str  # for logs, and at the workers
    endpoint: str
    raw: bytes  # the body
    tenant: Tenant
    qos: QosClass
    created_at: int  # Unix seconds, of its first attempt on any gateway
    may_be_held: bool  # another gateway may have begun it: workers are asked for what they have of it
    is_metered: bool = True  # counts towards its tenant's rates
    response_id: str | None = None  # of a background response


class RunDetached(Protocol):
    """Runs a request to its end and returns the body of its answer.

    Raises NoCapacity or Unavailable where another attempt may help, else another HalfmoonError. A request that is run
    again, here or on another gateway, goes on where it was as long as the workers hold it.
    """

    async def __call__(self, detached: DetachedRequest, on_events: OnEvents | None = None) -> dict[str, Any]:
        """`on_events` makes it a response of which the events are wanted, too."""
