"""How KV values are written as bytes: one file a codec. numpy and bytes only."""

from halfmoon.kv.codec.names import Codec

__all__ = ["Codec"]
