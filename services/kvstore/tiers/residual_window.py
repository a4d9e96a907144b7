"""Codec of a block when the tier's own is too coarse for the end of a prompt (KIVI's residual window).

When a block is encoded, the catalog knows how far it is from the end. A block with fewer than `residual_tokens` known
after it keeps its full precision. It is encoded again once the prompt has grown by that many. A prompt that branches
off within the coarse part of a longer one reads coarse values near its own end.
"""

from __future__ import annotations

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVLayout


def codec_for(codec: EntryCodec, meta: BlockMeta, catalog: Catalog) -> EntryCodec:
    """Codec in which a tier with `codec` stores this block now."""
    if not codec.residual_tokens or catalog.fragments.goes_on(meta.id, _window_blocks(codec, meta.layout)):
        return codec
    return codec.of_residual()


def left_behind(codec: EntryCodec, newest: BlockMeta, catalog: Catalog) -> bytes | None:
    """The block that left the window when `newest` arrived; None if there is none."""
    if not codec.residual_tokens:
        return None
    return catalog.fragments.before(newest.id, _window_blocks(codec, newest.layout))


def _window_blocks(codec: EntryCodec, layout: KVLayout | None) -> int:
    assert layout is not None, "a block whose bytes are at hand"
    return layout.num_blocks(codec.residual_tokens)
