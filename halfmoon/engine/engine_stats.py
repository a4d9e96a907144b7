"""What an engine holds and has to do at one moment."""

from __future__ import annotations

from dataclasses import dataclass

QUIET_S = 2.0
"""An engine that has not computed for so long is between requests, and those on the same cores probably are.

Between two prompts it is idle, too, and while others compute for it.
"""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of blocks and requests. Free blocks include cached ones that are not in use."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_waiting_tokens: int  # not computed yet, over waiting and running requests
    num_paused: int = 0
    num_prefilling: int = 0  # running ones whose prompt is not computed yet
    decode_context_tokens: int = 0  # that the other running ones see, whether or not the last step had them
