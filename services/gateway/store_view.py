"""The store's figures for the console, asked of the store when somebody looks."""

from __future__ import annotations

from typing import Any

from halfmoon.errors import HalfmoonError
from halfmoon.pb import kvstore_pb2
from halfmoon.pb.kvstore_pb2_grpc import KVStoreStub
from halfmoon.rpc.peer import Peer

_DEADLINE_S = 1.0


class StoreView:
    """Owns a connection to the store, where the gateway knows of one."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._peer = Peer(address) if address else None

    async def shown(self) -> dict[str, Any]:
        """`state` is `none`, `away` (with the reason) or `there` (with the figures of each tier)."""
        if self._peer is None:
            return {"state": "none"}
        stub = KVStoreStub(self._peer.channel)
        try:
            stats = await self._peer.call(stub.Stats, kvstore_pb2.StatsRequest(), deadline_s=_DEADLINE_S)
        except HalfmoonError as error:
            return {"state": "away", "address": self._address, "reason": error.message}
        return {"state": "there", "address": self._address, **stats_shown(stats)}

    async def close(self) -> None:
        """Ends the connection."""
        if self._peer is not None:
            await self._peer.close()


def stats_shown(stats: kvstore_pb2.StatsResponse) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "num_stored_total": stats.num_stored_total,
        "num_misses_total": stats.num_misses_total,
        "num_expired_total": stats.num_expired_total,
        "tiers": [
            {
                **{field.name: getattr(tier, field.name) for field in tier.DESCRIPTOR.fields if field.name != "tier"},
                "tier": kvstore_pb2.KVTier.Name(tier.tier).lower(),
            }
            for tier in stats.tiers
        ],
    }
