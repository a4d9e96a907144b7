"""When blocks go to the store: where the engine computes on the cores that writing needs, not while it does."""

from __future__ import annotations

from halfmoon.engine.engine_stats import QUIET_S, EngineStats

LONGEST_S = 20.0  # for an engine that is never idle; what a killed worker has not put by then is computed again
LOOK_S = 0.2


def is_computing(stats: EngineStats) -> bool:
    """Whether the engine has requests."""
    return stats.num_running + stats.num_waiting + stats.num_paused > 0


def may_wait(
    stats: EngineStats, idle_s: float, waited_s: float, longest_s: float, num_loose_blocks: int, *, is_half_full: bool
) -> bool:
    """Whether the next chain may wait a little longer without anything being lost.

    idle_s: since the engine was last seen to compute; 0: it does. num_loose_blocks: of waiting chains whose requests
    have ended. Prefix caches evict the least recently used block first, so while these are at most half of what is
    free, none of them is the next to go. is_half_full: of the queue, which drops what comes beyond its bound.
    """
    is_safe = 2 * num_loose_blocks <= stats.num_free_blocks and not is_half_full
    return idle_s < QUIET_S and is_safe and waited_s < longest_s
