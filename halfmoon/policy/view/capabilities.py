"""Who of a cluster can do what, and how alike they are: what decisions ask again and again, and what changes seldom."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats

Bools = NDArray[np.bool_]


class RoleMasks(NamedTuple):
    """Rows that can be each half of a placement, or both."""

    prefill: Bools
    decode: Bools
    both: Bools

    @property
    def is_any(self) -> bool:
        """Whether there is a worker for each half."""
        is_any = np.logical_or.reduce
        return bool(is_any(self.both) or (is_any(self.prefill) and is_any(self.decode)))

    @property
    def useful(self) -> RoleMasks:
        """The same without those that compute prompts which nobody decodes."""
        if np.logical_or.reduce(self.decode):
            return self
        return self._replace(prefill=np.zeros_like(self.prefill))


class Capabilities(NamedTuple):
    """True of a cluster view until a member joins, leaves, or is another in its role, its memory or its models.

    Not to be written to.
    """

    present: RoleMasks
    useful: RoleMasks  # of them
    is_complete: bool  # somebody is there for each half
    least_capacity_tokens: float  # of those present; infinite of nobody
    most_capacity_tokens: float  # of all members that there were; 0 of nobody
    knows_prefills: bool  # somebody's speed
    knows_steps: bool
    is_one_speed: bool  # those that do both compute prompts equally fast
    is_one_step_time_of_both: bool  # and decode so
    is_one_step_time_of_decode: bool  # those that only decode


def roster(
    present: RoleMasks, capacity_tokens: Floats, prefill_coefficients: Floats, step_coefficients: Floats
) -> Capabilities:
    """Of columns, an entry a row."""
    anybody = present.prefill | present.decode | present.both
    return Capabilities(
        present,
        present.useful,
        present.is_any,
        float(capacity_tokens[anybody].min(initial=math.inf)),
        float(capacity_tokens.max(initial=0.0)),
        bool(prefill_coefficients.any()),
        bool(step_coefficients.any()),
        _are_equal(prefill_coefficients[present.both]),
        _are_equal(step_coefficients[present.both]),
        _are_equal(step_coefficients[present.decode]),
    )


def _are_equal(rows: Floats) -> bool:
    return bool((rows == rows[:1]).all())
