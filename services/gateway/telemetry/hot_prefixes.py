"""Which cached prefixes are asked for most: the longest known prefix of each request, counted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.view.key_table import Keys

_MAX_PREFIXES = 4_096


@dataclass(slots=True)
class _Prefix:
    num_tokens: int
    num_uses: int = 0
    num_replicas: int = 0  # workers that had all of it when it was last asked for
    last_s: float = 0.0


class HotPrefixes:
    """Owns the counts, by the key of each prefix's last block; what was not asked for longest goes first."""

    def __init__(self, limit: int = _MAX_PREFIXES) -> None:
        self._limit = limit
        self._prefixes: OrderedDict[int, _Prefix] = OrderedDict()

    def note(self, keys: Keys, depths: NDArray[np.int64], block_tokens: int, now_s: float) -> None:
        """One request. `depths` is `BlockIndex.match` of its keys."""
        depth = min(int(depths.max(initial=0)), len(keys))
        if depth == 0:
            return
        key = int(keys[depth - 1])
        prefix = self._prefixes.setdefault(key, _Prefix(depth * block_tokens))
        self._prefixes.move_to_end(key)
        prefix.num_uses += 1
        prefix.num_replicas = int((depths >= depth).sum())
        prefix.last_s = now_s
        if len(self._prefixes) > self._limit:
            self._prefixes.popitem(last=False)

    def hottest(self, limit: int, now_s: float) -> list[dict[str, Any]]:
        """Those that saved the most tokens, as JSON has it."""
        ranked = sorted(self._prefixes.items(), key=lambda item: -item[1].num_uses * item[1].num_tokens)
        return [
            {
                "key": key.to_bytes(8, "little").hex(),
                "tokens": prefix.num_tokens,
                "uses": prefix.num_uses,
                "replicas": prefix.num_replicas,
                "age_s": now_s - prefix.last_s,
            }
            for key, prefix in ranked[:limit]
        ]
