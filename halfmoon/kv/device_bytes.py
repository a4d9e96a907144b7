"""KV bytes in a GPU's memory. Here they are only counted and handed on: no torch, and no CPU can read them."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.kv.kv_layout import KVBytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceBytes:
    """A run of bytes that the engine's device reaches, in the raw canonical order wherever they are KV."""

    num_bytes: int
    cells: object  # the engine's business: a tensor, [num_bytes] uint8


KVPlace = memoryview | DeviceBytes  # where KV is to be put
KVSource = KVBytes | DeviceBytes  # where KV is to be had
