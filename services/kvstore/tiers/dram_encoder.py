"""In which bytes blocks lie in DRAM: the tier's codec, but for the end of a prompt, which keeps its precision."""

from __future__ import annotations

import asyncio
import contextlib

from halfmoon.errors import DataLoss, NoCapacity, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.catalog.catalog import Catalog
from services.kvstore.catalog.entry import Tier
from services.kvstore.tiers.dram import Draft, DramTier
from services.kvstore.tiers.record import Record
from services.kvstore.tiers.residual import codec_for, left_behind


class DramEncoder:
    """Owns no state: it encodes beside the event loop, and what the catalog says may be another thing afterwards."""

    def __init__(self, codec: EntryCodec, dram: DramTier, catalog: Catalog) -> None:
        self._codec = codec
        self._dram = dram
        self._catalog = catalog

    async def commit(self, draft: Draft, known_digest: int | None = None) -> bool:
        """As `DramTier.commit`, which is the last thing it does. Whether the block was visible before."""
        codec = codec_for(self._codec, draft.meta, self._catalog)
        payload = None if codec.is_plain else await asyncio.to_thread(codec.encode, draft.room.view, draft.layout)
        was_here = draft.meta.id in self._catalog
        if payload is None:
            self._dram.commit(draft, known_digest)
        else:
            self._dram.commit_encoded(draft, codec, payload)
        return was_here

    async def encode_left_behind(self, newest: BlockMeta) -> None:
        """The prompt has gone on to `newest`: the block that is not near its end any more gets the tier's codec.

        Nothing happens where there is none, or no room for both of its forms for a moment.
        """
        block = left_behind(self._codec, newest, self._catalog)
        if block is None:
            return
        with contextlib.suppress(NotFound, DataLoss, NoCapacity):
            found = self._dram.acquire(block, use=False)
            try:
                if found.codec != self._codec and found.meta.layout is not None:
                    cells = Record(found.meta, found.codec, found.room.view).cells()
                    payload = await asyncio.to_thread(self._codec.encode, cells, found.meta.layout)
                    if self._catalog.is_in(block, Tier.DRAM):  # it may have been dropped meanwhile
                        self._dram.insert(found.meta, self._codec, payload)
            finally:
                self._dram.release(found)
