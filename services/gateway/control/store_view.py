"""The stores as operators see them: figures for the console, on demand, and emptying them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from halfmoon.errors import HalfmoonError
from halfmoon.pb import kvstore_pb2
from halfmoon.pb.kvstore_pb2_grpc import KVStoreAdminStub, KVStoreStub
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer

_DEADLINE_S = 1.0
_EMPTY_S = 60.0


class StoreView:
    """Owns a connection to each store that was looked at. `pool`: addresses of the stores."""

    def __init__(self, pool: Callable[[], Collection[str]], credential: Credential | None = None) -> None:
        self._pool = pool
        self._credential = credential
        self._peers: dict[str, Peer] = {}

    async def shown(self) -> list[dict[str, Any]]:
        """The stores as JSON values: `state` is `away` (with the reason) or `there` (with each tier's figures)."""
        addresses = self._pool()
        for address in self._peers.keys() - addresses:
            await self._peers.pop(address).close()
        return list(await asyncio.gather(*map(self._look, sorted(addresses))))

    async def _look(self, address: str) -> dict[str, Any]:
        peer = self._peer(address)
        stub = KVStoreStub(peer.channel)
        try:
            stats = await peer.call(stub.Stats, kvstore_pb2.StatsRequest(), deadline_s=_DEADLINE_S)
        except HalfmoonError as error:
            return {"state": "away", "address": address, "reason": error.message}
        return {"state": "there", "address": address, **stats_shown(stats)}

    async def empty(self) -> list[dict[str, Any]]:
        """Deletes all blocks of all stores; says of each what was dropped, or why it does not answer."""
        return list(await asyncio.gather(*map(self._empty, sorted(self._pool()))))

    async def _empty(self, address: str) -> dict[str, Any]:
        peer = self._peer(address)
        stub = KVStoreAdminStub(peer.channel)
        try:
            answer = await peer.call(stub.Empty, kvstore_pb2.EmptyRequest(), deadline_s=_EMPTY_S)
        except HalfmoonError as error:
            return {"address": address, "error": error.message}
        return {"address": address, "num_dropped": answer.num_dropped}

    def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            self._peers[address] = Peer(address, self._credential, "store")
        return self._peers[address]

    async def close(self) -> None:
        """Closes the connections."""
        while self._peers:
            await self._peers.popitem()[1].close()


def stats_shown(stats: kvstore_pb2.StatsResponse) -> dict[str, Any]:
    """A store's figures as JSON values."""
    return {
        "num_stored_total": stats.num_stored_total,
        "num_misses_total": stats.num_misses_total,
        "num_expired_total": stats.num_expired_total,
        "num_replicas": stats.num_replicas,
        "num_replicated_total": stats.num_replicated_total,
        "num_begun_elsewhere": stats.num_begun_elsewhere,
        "tenants": [
            {field.name: getattr(tenant, field.name) for field in tenant.DESCRIPTOR.fields} for tenant in stats.tenants
        ],
        "tiers": [
            {
                **{field.name: getattr(tier, field.name) for field in tier.DESCRIPTOR.fields if field.name != "tier"},
                "tier": kvstore_pb2.KVTier.Name(tier.tier).lower(),
            }
            for tier in stats.tiers
        ],
    }
