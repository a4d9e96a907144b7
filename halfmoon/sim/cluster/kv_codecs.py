"""KV codecs in the simulator: bytes saved on the network, and work added on the hosts."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

KvCodecName = Literal["raw", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class KvCodec:
    """One codec. Ratios refer to bfloat16 KV; speeds are those of one thread per worker; None: no work."""

    name: KvCodecName
    ratio: float  # bytes sent per byte of KV
    encode_bytes_per_s: float | None
    decode_bytes_per_s: float | None
    divergence: float  # of the next-token distribution, in nats


KV_CODECS: MappingProxyType[KvCodecName, KvCodec] = MappingProxyType(
    {
        "raw": KvCodec("raw", 1.0, None, None, 0.0),
        "int8": KvCodec("int8", 1 / 1.94, 1.40e9, 2.06e9, 1.3e-4),
        "int4": KvCodec("int4", 1 / 3.20, 0.86e9, 1.58e9, 4.8e-3),
    }
)
"""Measured on SmolLM2-135M by `benchmarks/codecs` (docs/log/kv.md), on two cores of 2025."""
