"""Conversion between a KV layout and its protobuf message, the same for every service that names one."""

from __future__ import annotations

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import types_pb2


def layout_message(layout: KVLayout) -> types_pb2.KVLayout:
    """The message that `layout_from` reads."""
    return types_pb2.KVLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
    )


def layout_from(message: types_pb2.KVLayout) -> KVLayout:
    """Raises Incompatible if the message is not a valid layout."""
    return KVLayout(
        message.num_layers,
        message.num_kv_heads,
        message.head_dim,
        message.dtype,  # type: ignore[arg-type]  # KVLayout rejects anything but a KVDtype
        message.block_tokens,
    )
