"""Loads blocks from one holder into the engine: lent in place on the same host, through gRPC otherwise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from halfmoon.errors import DataLoss, Incompatible, NotFound
from halfmoon.kv.codec import Codec
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.rpc.store.kvstore_client import KVStoreClient

log = logging.getLogger(__name__)

Write = Callable[[int, KVBytes], Awaitable[None]]  # (block's number in its prompt, its cells)
WriteLayers = Callable[[range, Mapping[int, KVBytes]], Awaitable[None]]  # (layers, their cells by block's number)

_DEADLINE_S = 30.0
_ASK_AGAIN_S = 60.0  # a store that was restarted may lend


class BlockSource:
    """Owns whether the store's memory can be read in place. Knows nothing of requests."""

    def __init__(self, layout: KVLayout, now_s: Callable[[], float] = time.monotonic, *, may_lend: bool = True) -> None:
        """may_lend: False for a holder that never does."""
        self._layout = layout
        self._now_s = now_s
        self._ask_at_s = (
            -math.inf if may_lend else math.inf
        )  # when to ask for a loan again; until then the store is known to lend nothing

    async def load(
        self, store: KVStoreClient, keys: Mapping[int, bytes], write: Write, codec: Codec = Codec.RAW
    ) -> list[int]:
        """Writes the leading blocks of `keys` that the store delivers intact; returns their numbers.

        codec: what may be sent over the network, exactly.
        Whatever was written for other blocks is invalid. Raises Unavailable and DeadlineExceeded when the store is
        away, and any error of `write`.
        """
        if self.may_lend:
            try:
                return await self._borrow(store, keys, write, codec)
            except Incompatible as error:
                self._ask_at_s = self._now_s() + _ASK_AGAIN_S
                log.info("store.not_lending", extra={"reason": error.message})
        return await self._get(store, keys, write, codec)

    @property
    def may_lend(self) -> bool:
        """Whether the store's memory may be read in place."""
        return self._now_s() >= self._ask_at_s

    async def load_layers(
        self,
        store: KVStoreClient,
        keys: Mapping[int, bytes],
        layers_at_once: int,
        write: WriteLayers,
        codec: Codec = Codec.RAW,
        *,
        request_id: str = "",
        deadline_s: float = _DEADLINE_S,
    ) -> list[int]:
        """Writes the first layers of the leading blocks that the holder serves, then their next ones.

        request_id: of a prompt that the holder computes; its blocks, numbered as in `keys`, come as they are computed.
        Returns those blocks if all their layers came intact, or none. Raises as `load` does.
        """
        written: list[int] = []
        first = min(keys) if request_id else 0
        run = store.get_layers(
            list(keys.values()),
            self._layout,
            layers_at_once,
            codec,
            request_id=request_id,
            first_block=first,
            deadline_s=deadline_s,
        )
        async with aclosing(run) as parts:
            while True:
                try:
                    part = await anext(parts, None)
                except (NotFound, DataLoss) as error:
                    log.debug("store.miss", extra={"reason": error.message})
                    return []
                if part is None:
                    return written
                layers, blocks = part
                cells: dict[int, KVBytes] = dict(zip(keys, blocks, strict=False))
                await write(layers, cells)
                written = list(cells)

    async def _borrow(self, store: KVStoreClient, keys: Mapping[int, bytes], write: Write, codec: Codec) -> list[int]:
        written: list[int] = []
        async with store.borrow(list(keys.values()), deadline_s=_DEADLINE_S) as lent:
            for index, block in zip(keys, lent, strict=False):
                try:
                    cells = await store.read(block)
                except DataLoss:
                    break
                await write(index, cells)
                written.append(index)
        if len(written) < len(keys):  # the others may lie where the store cannot lend
            left = {index: key for index, key in keys.items() if index not in written}
            written += await self._get(store, left, write, codec)
        return written

    async def _get(self, store: KVStoreClient, keys: Mapping[int, bytes], write: Write, codec: Codec) -> list[int]:
        written: list[int] = []
        async with aclosing(
            store.get_run(list(keys.values()), self._layout, codec=codec, deadline_s=_DEADLINE_S)
        ) as blocks:
            for index in keys:
                try:
                    cells = await anext(blocks, None)
                except (NotFound, DataLoss) as error:
                    log.debug("store.miss", extra={"reason": error.message})
                    break
                if cells is None:
                    break
                await write(index, cells)
                written.append(index)
        return written
