"""Which codec a block gets where the tier's own is too coarse for the end of a prompt (KIVI's residual window).

How far a block is from the end is what the catalog knows when the block is encoded: a block with fewer than
`residual_tokens` known behind it keeps its full precision, and is encoded anew when the prompt has gone on for that
long. A prompt that leaves a longer one within its coarse part reads coarse values near its own end.
"""

from __future__ import annotations

from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVLayout
from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.catalog.catalog import Catalog


def codec_for(codec: EntryCodec, meta: BlockMeta, catalog: Catalog) -> EntryCodec:
    """What a tier of `codec` stores this block in now."""
    if not codec.residual_tokens or catalog.goes_on(meta.id, _window_blocks(codec, meta.layout)):
        return codec
    return codec.of_residual()


def left_behind(codec: EntryCodec, newest: BlockMeta, catalog: Catalog) -> bytes | None:
    """The block that the window moved away from when `newest` came; None if there is none."""
    if not codec.residual_tokens:
        return None
    return catalog.before(newest.id, _window_blocks(codec, newest.layout))


def _window_blocks(codec: EntryCodec, layout: KVLayout | None) -> int:
    assert layout is not None, "a block whose bytes are at hand"
    return layout.num_blocks(codec.residual_tokens)
