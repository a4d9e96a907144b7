"""What a worker has not been sent yet: orders, other members, stores."""

from __future__ import annotations

from collections.abc import Iterator

from halfmoon.pb.gateway_pb2 import CacheMembers, DecodeMembers, GatewayMessage, ResendBlocks, Stores
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.worker import Worker


def take_news(worker: Worker, membership: Membership) -> Iterator[GatewayMessage]:
    """Messages for the worker. What they say counts as sent."""
    worker.has_news.clear()
    orders, worker.orders = worker.orders, []
    yield from orders
    if worker.missed_blocks:
        worker.missed_blocks = False
        yield GatewayMessage(resend_blocks=ResendBlocks())
    if members := _decode_members(worker, membership.decode_addresses):  # also where it may prefill later
        yield GatewayMessage(decode_members=members)
    if worker.member.identity.can_fetch and (caches := _cache_members(worker, membership.cache_addresses)):
        yield GatewayMessage(cache_members=caches)
    if (stores := membership.stores.addresses) != worker.sent_stores:
        worker.sent_stores = stores
        yield GatewayMessage(stores=Stores(addresses=sorted(stores)))


def _decode_members(worker: Worker, now: frozenset[str]) -> DecodeMembers | None:
    """What has changed since the last message; None for nothing."""
    sent, worker.sent_members = worker.sent_members, now
    return DecodeMembers(joined=now - sent, left=sent - now) if now != sent else None


def _cache_members(worker: Worker, now: frozenset[str]) -> CacheMembers | None:
    """Likewise, of the workers whose prefix caches it may read."""
    sent, worker.sent_caches = worker.sent_caches, now
    return CacheMembers(joined=now - sent, left=sent - now) if now != sent else None
