"""Codec numbers as a frame's header carries them. Never reused, never renumbered."""

from __future__ import annotations

from enum import IntEnum


class Codec(IntEnum):
    """How KV values are encoded as bytes."""

    RAW = 0  # the dtype's own bytes, little-endian
    INT8 = 1
    INT4 = 2
    FP8 = 3
    INT2 = 4  # store only, and never the last tokens of a prompt: see `EntryCodec.residual_tokens`
