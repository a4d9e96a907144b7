"""Copies of KV that a codec encodes on their way out of an engine, or decodes on their way in."""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.errors import Incompatible
from halfmoon.kv.codec import Codec, Shape, decode, encode
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.kv_layout import KVDtype, KVLayout


def write_decoded(
    write: Callable[[KVSource], None],
    layout: KVLayout,
    shape: Shape,
    payload: KVSource,
    codec: Codec,
    dtype: KVDtype | None,
) -> None:
    """Writes values of `shape` that `codec` encoded from `dtype` (None: the layout's).

    Raises Incompatible for values in device memory that would have to be converted.
    """
    if not isinstance(payload, DeviceBytes):
        write(decode(codec, payload, shape, dtype or layout.dtype, layout.dtype).data)
        return
    if codec is not Codec.RAW or dtype not in (None, layout.dtype):
        raise Incompatible("KV in device memory is taken as it is, raw and in the layout's dtype")
    write(payload)


def read_encoded(
    read: Callable[[KVPlace | None], memoryview], layout: KVLayout, shape: Shape, out: KVPlace | None, codec: Codec
) -> memoryview:
    """Reads values of `shape`, encoded by `codec`, into `out`, if given."""
    if codec is Codec.RAW:
        return read(out)
    assert not isinstance(out, DeviceBytes), "codecs compute on the CPU"
    return encode(codec, decode(Codec.RAW, read(None), shape, layout.dtype), layout.dtype, out)
