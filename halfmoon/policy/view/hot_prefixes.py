"""How often each known prefix was asked for lately, and near which store: what is hot, and where."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.view.key_table import Keys

HALF_LIFE_S = 300.0  # in which a use counts half; as long as stores keep unused copies
_MAX_PREFIXES = 4_096


class HotPrefix(NamedTuple):
    """One prefix as it is shown."""

    key: int  # of its last block
    num_tokens: int
    num_uses: float  # decayed
    num_holders: int  # that had all of it at its last use
    last_s: float


@dataclass(slots=True)
class _Prefix:
    num_tokens: int
    num_holders: int = 0
    last_s: float = 0.0
    num_uses: float = 0.0  # as of `last_s`
    near: dict[str, float] = field(default_factory=dict)  # uses by store

    def decay(self, now_s: float) -> None:
        """Brings the counts to `now_s`."""
        share = 0.5 ** (max(0.0, now_s - self.last_s) / HALF_LIFE_S)
        self.num_uses *= share
        self.near = {store: uses * share for store, uses in self.near.items()}
        self.last_s = max(self.last_s, now_s)


class HotPrefixes:
    """Owns a decayed count of uses of each request's longest known prefix; forgets the least recently used one."""

    def __init__(self, limit: int = _MAX_PREFIXES) -> None:
        self._limit = limit
        self._prefixes: OrderedDict[int, _Prefix] = OrderedDict()

    def note(
        self,
        keys: Keys,
        cached_blocks: NDArray[np.int64],
        block_tokens: int,
        now_s: float,
        near: str = "",
        pool: int | None = None,
    ) -> float:
        """Counts one request; returns how often its prefix was lately asked for, near that store if there is one.

        cached_blocks: `BlockIndex.match` of its keys. near: the store nearest to the chosen worker; empty: none.
        pool: the holder that stands for all stores, which are counted by themselves.
        """
        depth = min(int(cached_blocks.max(initial=0)), len(keys))
        if depth == 0:
            return 0.0
        key = int(keys[depth - 1])
        prefix = self._prefixes.setdefault(key, _Prefix(depth * block_tokens, last_s=now_s))
        self._prefixes.move_to_end(key)
        prefix.decay(now_s)
        prefix.num_uses += 1
        has_all = cached_blocks >= depth
        prefix.num_holders = int(has_all.sum()) - (pool is not None and bool(has_all[pool]))
        if near:
            prefix.near[near] = prefix.near.get(near, 0.0) + 1
        if len(self._prefixes) > self._limit:
            self._prefixes.popitem(last=False)
        return prefix.near[near] if near else prefix.num_uses

    def hottest(self, limit: int, now_s: float) -> list[HotPrefix]:
        """The prefixes that lately saved the most tokens."""
        shown = [
            HotPrefix(key, one.num_tokens, one.num_uses * 0.5 ** ((now_s - one.last_s) / HALF_LIFE_S), one.num_holders,
                      one.last_s)
            for key, one in self._prefixes.items()
        ]  # fmt: skip
        return sorted(shown, key=lambda prefix: -prefix.num_uses * prefix.num_tokens)[:limit]
