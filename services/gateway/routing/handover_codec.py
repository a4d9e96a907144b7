"""The encoding of KV in transfer that prefill workers are asked for."""

from __future__ import annotations

from typing import NamedTuple

from halfmoon.pb.prefill_pb2 import FP8, INT4, INT8, LZ4, RAW, ZSTD, KVCodec

_LOWER: dict[KVCodec.ValueType, KVCodec.ValueType] = {
    RAW: INT8,
    LZ4: INT8,
    ZSTD: INT8,
    FP8: INT4,
    INT8: INT4,
    INT4: INT4,
}


class HandoverCodec(NamedTuple):
    """One codec, or the worker's choice between exact ones and this one."""

    codec: KVCodec.ValueType
    is_choice: bool = False
    is_degraded: bool = False  # lossier than it is for others, who must not find such KV in a cache

    @classmethod
    def parse(cls, setting: str) -> HandoverCodec:
        """Parses `GatewayConfig.handover_codec`."""
        return cls(RAW, is_choice=True) if setting == "auto" else cls(KVCodec.Value(setting.upper()))

    @property
    def lower(self) -> HandoverCodec:
        """The next lossier one, for a request whose class gives precision up."""
        return self._replace(codec=_LOWER[self.codec], is_degraded=True)
