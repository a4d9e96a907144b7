"""Converts the store's values to protobuf messages and back."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfmoon.catalog.block_identity import ID_BYTES, key_of, tag_of
from halfmoon.catalog.entry import Entry, Tier
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import kvstore_pb2, types_pb2
from halfmoon.rpc.layout_message import layout_from, layout_message

TIERS: dict[Tier, kvstore_pb2.KVTier.ValueType] = {
    Tier.DRAM: kvstore_pb2.DRAM,
    Tier.DISK: kvstore_pb2.DISK,
    Tier.COLD: kvstore_pb2.COLD,
}


def tiers_from(values: Iterable[int]) -> set[Tier]:
    """Parses tiers. Raises InvalidRequest for an unknown one."""
    try:
        return {Tier(value) for value in values}
    except ValueError as err:
        raise InvalidRequest(f"no such tier: {err}", param="tiers") from err


def named_layout(message: types_pb2.KVLayout) -> KVLayout:
    """Parses a layout. Raises InvalidRequest if it is missing, Incompatible if it is invalid."""
    if message == types_pb2.KVLayout():
        raise InvalidRequest("a Put must name its block's layout", param="layout")
    return layout_from(message)


def checked_ids(ids: Iterable[bytes]) -> list[bytes]:
    """Checks block ids. Raises InvalidRequest for an invalid one."""
    checked = list(ids)
    if any(len(block) != ID_BYTES for block in checked):
        raise InvalidRequest(f"a block id has {ID_BYTES} bytes: 8 of the tenant's tag, 16 of the key", param="ids")
    return checked


def place_message(block: bytes, tiers: Iterable[Tier]) -> kvstore_pb2.BlockPlace:
    """Message of the tiers that hold a block."""
    return kvstore_pb2.BlockPlace(key=key_of(block), tenant_tag=tag_of(block), tiers=[TIERS[tier] for tier in tiers])


def info_message(entry: Entry) -> kvstore_pb2.BlockInfo:
    """Message of everything that an operator may want to know of a block."""
    meta = entry.meta
    return kvstore_pb2.BlockInfo(
        id=meta.id,
        parent=meta.parent or b"",
        depth=meta.depth,
        tiers=[TIERS[tier] for tier in sorted(entry.tiers)],
        used_bytes=sum(holding.num_bytes for holding in entry.tiers.values()),
        pinned=entry.pinned,
        expires_at_s=0.0 if meta.expires_at_s == math.inf else meta.expires_at_s,
        num_uses=entry.usage.num_uses,
        tenant=meta.tenant,
        layout=None if meta.layout is None else layout_message(meta.layout),
    )
