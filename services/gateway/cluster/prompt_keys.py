"""The keys of a prompt's blocks: one chain for each KV layout in the cluster.

Workers that differ in dtype name the same tokens differently, because neither may serve the other's cells as its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.keys import iter_block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.values import NOTHING_CACHED
from halfmoon.policy.view.block_index import BlockIndex, short_keys
from halfmoon.policy.view.key_table import Keys


class KeyChain(NamedTuple):
    """A prompt's full blocks in one layout."""

    layout: KVLayout
    keys: list[bytes]
    short: Keys  # as the block index takes them


class PromptKeys:
    """Owns the chains of one prompt's first tokens, which may grow."""

    def __init__(self, model_fingerprint: str, layouts: Sequence[KVLayout], tenant_salt: bytes = b"") -> None:
        self._roots = {layout: root_key(model_fingerprint, layout, tenant_salt) for layout in layouts}
        self._keys: dict[KVLayout, list[bytes]] = {layout: [] for layout in layouts}
        self.chains: tuple[KeyChain, ...] = ()

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """The layouts of the chains."""
        return tuple(self._roots)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Names the full blocks of `token_ids`, which begin with all tokens named so far."""
        for layout, keys in self._keys.items():
            more = token_ids[len(keys) * layout.block_tokens :]
            keys += iter_block_keys(keys[-1] if keys else self._roots[layout], more, layout.block_tokens)
        self.chains = tuple(KeyChain(layout, keys, short_keys(keys)) for layout, keys in self._keys.items())

    def continued(self, token_ids: Sequence[int]) -> PromptKeys:
        """Keys of their own for `token_ids`, which begin with all tokens named so far."""
        longer = copy(self)
        longer._keys = {layout: list(keys) for layout, keys in self._keys.items()}
        longer.extend(token_ids)
        return longer

    def chain(self, layout: KVLayout | None) -> KeyChain | None:
        """The chain in `layout`; None if there is none."""
        return next((chain for chain in self.chains if chain.layout == layout), None)

    def held(self, index: BlockIndex) -> NDArray[np.int64]:
        """How many leading blocks each holder has, as `BlockIndex.match`.

        Of a store that workers of several layouts use, those in the layout that it has most of.
        """
        if not self.chains:
            return NOTHING_CACHED
        held = index.match(self.chains[0].short)
        for chain in self.chains[1:]:
            held = np.maximum(held, index.match(chain.short))
        return held
