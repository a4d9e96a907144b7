"""KV codecs in the simulator: bytes saved on the network, and work added on the hosts."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from halfmoon.kv.codec.choice import CodecCost, quickest_codec
from halfmoon.kv.codec.names import Codec

KvCodecName = Literal["raw", "lz4", "zstd", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class KvCodec:
    """One codec. Ratios refer to bfloat16 KV; speeds are those of one thread per worker; None: no work."""

    ratio: float  # bytes sent per byte of KV
    encode_bytes_per_s: float | None = None
    decode_bytes_per_s: float | None = None

    @property
    def cost(self) -> CodecCost:
        """Per byte of KV."""
        speeds = self.encode_bytes_per_s, self.decode_bytes_per_s
        return CodecCost(self.ratio, *(0.0 if speed is None else 1 / speed for speed in speeds))


KV_CODECS: MappingProxyType[KvCodecName, KvCodec] = MappingProxyType(
    {
        "raw": KvCodec(1.0),
        "lz4": KvCodec(1 / 1.22, 0.6e9, 2.0e9),
        "zstd": KvCodec(1 / 1.46, 0.5e9, 1.3e9),
        "int8": KvCodec(1 / 1.94, 1.40e9, 2.06e9),
        "int4": KvCodec(1 / 3.20, 0.86e9, 1.58e9),
    }
)
"""Measured on SmolLM2-135M by `codecs` and `entries` of `benchmarks/kv` (docs/log/kv.md, docs/log/kvstore.md)."""

_EXACT: dict[Codec, KvCodecName] = {Codec.RAW: "raw", Codec.LZ4: "lz4", Codec.ZSTD: "zstd"}


def auto_codec(link_bytes_per_s: float) -> KvCodec:
    """What workers choose by themselves for a link of that speed, of the exact codecs."""
    costs: dict[Codec, CodecCost] = {
        codec: KV_CODECS[name].cost for codec, name in _EXACT.items() if codec is not Codec.RAW
    }
    return KV_CODECS[_EXACT[quickest_codec(1 / link_bytes_per_s, costs, costs.keys())]]
