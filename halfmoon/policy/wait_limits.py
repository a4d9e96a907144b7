"""How long a request waits for a worker when there is none."""

from __future__ import annotations

from typing import NamedTuple

MAY_RETURN_S = 5.0  # a worker that reconnects or restarts is back within this time


class WaitLimits(NamedTuple):
    """How long one gateway waits for a worker."""

    failover_s: float = 60.0  # for a request that lost its worker: the time a worker may need to restart
    return_s: float = 3.0  # for a new request, if a worker is expected soon

    def seconds(self, *, is_inside: bool, expects_worker: bool) -> float:
        """The limit for a request; `is_inside`: it had a worker before."""
        if is_inside:
            return self.failover_s
        return self.return_s if expects_worker else 0.0
