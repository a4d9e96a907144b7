"""The targets of a map, and what one simulated pass says about all of them at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfmoon.sim.result import Criterion, SimResult
from halfmoon.sim.workloads.workload import Floats

_DIGITS = 2  # significant ones of a target
_AROUND = 4.0


@dataclass(frozen=True, slots=True)
class TargetGrid:
    """Every TTFT target with every TPOT target, in ascending order, in seconds."""

    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """`(num_ttfts, num_tpots)`, the shape of everything that has a value for each cell."""
        return len(self.ttfts_s), len(self.tpots_s)

    def attainment(self, result: SimResult, criterion: Criterion) -> Floats:
        """The share of a pass's requests that met each cell's targets: [num_ttfts, num_tpots].

        Which worker takes a request does not depend on targets here, so one pass answers for all cells.
        """
        done = result.is_completed
        ttft = done & (result.ttft_s <= np.array(self.ttfts_s)[:, None])  # [num_ttfts, num_requests]
        is_short = np.isnan(result.tpot_s)
        tpot = done & (is_short | (result.tpot_s <= np.array(self.tpots_s)[:, None]))  # [num_tpots, num_requests]
        num = max(len(done), 1)
        if criterion == "joint":
            shares: Floats = (ttft.astype(np.float64) @ tpot.T.astype(np.float64)) / num
            return shares
        least: Floats = np.minimum(ttft.mean(axis=1)[:, None], tpot.mean(axis=1)[None, :])
        return least


def spaced(least: float, most: float, num: int) -> tuple[float, ...]:
    """`num` targets at equal ratios, rounded to two digits; fewer if rounding makes some equal."""
    values = (float(f"{one:.{_DIGITS}g}") for one in np.geomspace(least, most, num))
    return tuple(dict.fromkeys(values))


def around(target_s: float) -> tuple[float, ...]:
    """Seven targets from a quarter of the given one to four times it, which is the middle one."""
    return spaced(target_s / _AROUND, target_s * _AROUND, 7)
