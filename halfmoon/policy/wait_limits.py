"""How long a request waits for a worker where none is there."""

from __future__ import annotations

from typing import NamedTuple

MAY_RETURN_S = 5.0  # a worker that lost its connection, or was started again, is back within these


class WaitLimits(NamedTuple):
    """Of one gateway."""

    failover_s: float = 60.0  # of a request that lost its worker: so long a worker may need to start again
    return_s: float = 3.0  # of a new one, where there may soon be a worker again

    def seconds(self, *, is_inside: bool, expects_worker: bool) -> float:
        """`is_inside`: it had a worker before."""
        if is_inside:
            return self.failover_s
        return self.return_s if expects_worker else 0.0
