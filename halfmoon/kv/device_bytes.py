"""KV bytes outside this process's memory: a GPU's, or several ranks'. They are only counted and passed on here."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.kv.kv_layout import KVBytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceBytes:
    """A run of bytes that the engine's device, or its ranks, can reach, in raw canonical order when they are KV."""

    num_bytes: int
    cells: object  # opaque outside the engine: a tensor, [num_bytes] uint8, or a `Ticket`


KVPlace = memoryview | DeviceBytes  # where KV is written to
KVSource = KVBytes | DeviceBytes  # where KV is read from
