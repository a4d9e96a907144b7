"""KV bytes in GPU memory. They are only counted and passed on here: no torch, and no CPU can read them."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.kv.kv_layout import KVBytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceBytes:
    """A run of bytes that the engine's device can reach, in raw canonical order when they are KV."""

    num_bytes: int
    cells: object  # opaque outside the engine: a tensor, [num_bytes] uint8


KVPlace = memoryview | DeviceBytes  # where KV is written to
KVSource = KVBytes | DeviceBytes  # where KV is read from
