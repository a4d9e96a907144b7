"""Which store of a pool a worker's new blocks go to: each block about once, as near as is sensible."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SPILL_FACTOR = 1.5  # evens out how long stores keep what nobody uses, without sending blocks to and fro


def choose_store(room_idle_s: Sequence[float]) -> int:
    """The store that takes new blocks, of those in order of nearness.

    `room_idle_s`: for each, how long the block was not used that would make room there; inf: there is room. The nearest
    store takes them, unless another one has room and it has none, or gives up what was unused `SPILL_FACTOR` times as
    long: of these the one that loses least.
    """
    best = max(range(len(room_idle_s)), key=lambda store: (room_idle_s[store], -store))
    return best if room_idle_s[best] > SPILL_FACTOR * room_idle_s[0] else 0


def runs(num_blocks: int, wanted: Collection[int]) -> list[range]:
    """The runs of successive numbers below `num_blocks` that are in `wanted`."""
    found: list[range] = []
    for block in range(num_blocks):
        if block in wanted:
            begins = not found or found[-1].stop != block
            start = block if begins else found.pop().start
            found.append(range(start, block + 1))
    return found
