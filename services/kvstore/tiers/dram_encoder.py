"""Encodes blocks for DRAM in the tier's codec, except the end of a prompt, which keeps its precision."""

from __future__ import annotations

import asyncio
import contextlib

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.errors import DataLoss, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from services.kvstore.tiers.dram import Draft, DramTier
from services.kvstore.tiers.record import Record
from services.kvstore.tiers.residual_window import codec_for, left_behind


class DramEncoder:
    """Owns no state. Encodes off the event loop, so the catalog may have changed afterwards."""

    def __init__(self, codec: EntryCodec, dram: DramTier, catalog: Catalog) -> None:
        self._codec = codec
        self._dram = dram
        self._catalog = catalog

    async def commit(self, draft: Draft, known_digest: int | None = None) -> bool:
        """Encodes, then commits as `DramTier.commit`. Returns whether the block was visible before."""
        codec = codec_for(self._codec, draft.meta, self._catalog)
        payload = None if codec.is_plain else await asyncio.to_thread(codec.encode, draft.room.view, draft.layout)
        was_here = draft.meta.id in self._catalog
        if payload is None:
            self._dram.commit(draft, known_digest)
        else:
            self._dram.commit_encoded(draft, codec, payload)
        return was_here

    async def encode_left_behind(self, newest: BlockMeta) -> None:
        """Encodes the block that is no longer near the end of its prompt, now that `newest` follows.

        Does nothing if there is no such block, or no room for both of its forms at once.
        """
        block = left_behind(self._codec, newest, self._catalog)
        if block is None:
            return
        with contextlib.suppress(NotFound, DataLoss, NoCapacity):
            original = self._dram.acquire(block, use=False)
            try:
                if original.codec != self._codec and original.meta.layout is not None:
                    cells = Record(original.meta, original.codec, original.room.view).cells()
                    payload = await asyncio.to_thread(self._codec.encode, cells, original.meta.layout)
                    if self._catalog.is_in(block, Tier.DRAM):  # it may have been dropped in the meantime
                        self._dram.insert(original.meta, self._codec, payload)
            finally:
                self._dram.release(original)
