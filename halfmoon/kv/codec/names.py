"""Codec numbers as a frame's header carries them. Never reused, never renumbered."""

from __future__ import annotations

from enum import IntEnum


class Codec(IntEnum):
    """How KV values are encoded as bytes."""

    RAW = 0  # the dtype's own bytes, little-endian
    INT8 = 1
    INT4 = 2
    INT2 = 4  # store only, and never the last tokens of a prompt: see `EntryCodec.residual_tokens`
    LZ4 = 5  # exact, of any size below RAW's; stored blocks say it apart from their quantiser: see `EntryCodec`
    ZSTD = 6
    FP8 = 7  # a scale for each row; 3 was fp8 with other scales

    @property
    def is_exact(self) -> bool:
        """Whether values come back as they were."""
        return self in (Codec.RAW, Codec.LZ4, Codec.ZSTD)
