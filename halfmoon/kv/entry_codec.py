"""How a stored block is encoded: an optional quantiser, then an optional entropy coder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.kv.codec import LOSSLESS, Codec, decode, encode, encoded_bytes
from halfmoon.kv.codec.floats import UNSIGNED
from halfmoon.kv.codec.lossless import Lossless, compress, compress_planes, decompress, decompress_planes
from halfmoon.kv.kv_layout import KVBytes, KVLayout

_RESIDUAL_TOKENS = 128
_QUANTISERS = tuple(codec.name for codec in Codec if codec not in LOSSLESS)


@dataclass(frozen=True, slots=True)
class EntryCodec:
    """A quantiser and an entropy coder. Lossless coding is byte-exact; all error comes from the quantiser."""

    quantiser: Codec = Codec.RAW
    lossless: Lossless = Lossless.NONE

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `raw`, a quantiser (`int8`), an entropy coder (`zstd`), or both (`int8+zstd`).

        Raises InvalidRequest for anything else, Incompatible if a package that it needs is not installed.
        """
        parts = text.upper().split("+")
        quantisers = [part for part in parts if part in _QUANTISERS]
        coders = [part for part in parts if part in Lossless.__members__ and part != "NONE"]
        if len(quantisers) + len(coders) != len(parts) or len(quantisers) > 1 or len(coders) > 1:
            names = ", ".join(name.lower() for name in (*_QUANTISERS, *list(Lossless.__members__)[1:]))
            raise InvalidRequest(f"no codec is called {text!r}: there are {names}, and two of them joined by +")
        lossless = Lossless[coders[0]] if coders else Lossless.NONE
        compress(b"", lossless)
        return cls(Codec[quantisers[0]] if quantisers else Codec.RAW, lossless)

    @property
    def is_plain(self) -> bool:
        """Whether the bytes stay unchanged."""
        return self == EntryCodec()

    @property
    def residual_tokens(self) -> int:
        """Tokens at the end of a prompt that need a finer codec (KIVI's residual window); 0 for most codecs."""
        return _RESIDUAL_TOKENS if self.quantiser is Codec.INT2 else 0

    def of_residual(self) -> EntryCodec:
        """The lossless codec for blocks that hold those tokens."""
        return replace(self, quantiser=Codec.RAW)

    def encode(self, cells: KVBytes, layout: KVLayout) -> KVBytes:
        """Encodes one whole block: `cells` are raw, in canonical order."""
        if self.is_plain:
            return cells
        shape = layout.memory_shape(layout.num_layers, layout.block_tokens)
        if self.quantiser is Codec.RAW:
            return compress_planes(cells, shape, layout.item_bytes, self.lossless)
        values = np.frombuffer(cells, UNSIGNED[layout.dtype]).reshape(shape)
        quantised = encode(self.quantiser, values, layout.dtype)
        return compress(quantised, self.lossless) if self.lossless else quantised

    def decode(self, payload: KVBytes, layout: KVLayout) -> memoryview:
        """The block's raw cells. Raises DataLoss or InvalidRequest if `payload` is not an encoded block."""
        if self.is_plain:
            return memoryview(payload).cast("B")
        if self.quantiser is Codec.RAW:
            shape = layout.memory_shape(layout.num_layers, layout.block_tokens)
            return decompress_planes(payload, shape, layout.item_bytes, self.lossless).data.cast("B")
        shape = layout.shape(layout.num_layers, layout.block_tokens)
        quantised = decompress(payload, encoded_bytes(self.quantiser, shape, layout.dtype), self.lossless)
        return decode(self.quantiser, quantised, shape, layout.dtype).reshape(-1).view(np.uint8).data

    def __str__(self) -> str:
        parts = [] if self.quantiser is Codec.RAW and self.lossless else [self.quantiser.name.lower()]
        return "+".join(parts + ([self.lossless.name.lower()] if self.lossless else []))
