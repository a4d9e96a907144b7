"""Keys of a workload's prefix blocks, as the block index takes them."""

from __future__ import annotations

import numpy as np

from halfmoon.policy.view.key_table import Keys
from halfmoon.sim.workloads.workload import Ints

NO_KEYS: Keys = np.zeros(0, dtype=np.uint64)


def prefix_keys(ids: Ints) -> Keys:
    """Uniformly distributed and never 0, like block keys (the finalizer of splitmix64, which is a bijection)."""
    if not len(ids):
        return NO_KEYS
    keys = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    keys[keys == 0] = 1
    return keys
