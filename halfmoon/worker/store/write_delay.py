"""When blocks go to the store: where the engine computes on the cores that writing needs, not while it does."""

from __future__ import annotations

from halfmoon.engine.engine_stats import EngineStats

LONGEST_S = 10.0  # for an engine that is never idle; what a killed worker has not put by then is computed again
LOOK_S = 0.2


def may_wait(
    stats: EngineStats, waited_s: float, longest_s: float, num_loose_blocks: int, *, is_half_full: bool
) -> bool:
    """Whether the next chain may wait a little longer without anything being lost.

    num_loose_blocks: of waiting chains whose requests have ended. Prefix caches evict the least recently used block
    first, so while these are at most half of what is free, none of them is the next to go. is_half_full: of the queue,
    which drops what comes beyond its bound.
    """
    is_computing = stats.num_running + stats.num_waiting + stats.num_paused > 0
    is_safe = 2 * num_loose_blocks <= stats.num_free_blocks and not is_half_full
    return is_computing and is_safe and waited_s < longest_s
