"""What the workers of a cluster can do, and how alike they are. Every decision asks; the answers rarely change."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats

Bools = NDArray[np.bool_]


class RoleMasks(NamedTuple):
    """Rows that can be the prefill worker, the decode worker, or both workers of a placement. Masks [num_rows]."""

    prefill: Bools
    decode: Bools
    both: Bools

    @property
    def is_any(self) -> bool:
        """Whether a request can be placed on these rows."""
        is_any = np.logical_or.reduce
        return bool(is_any(self.both) or (is_any(self.prefill) and is_any(self.decode)))

    @property
    def useful(self) -> RoleMasks:
        """The same masks, without prefill workers if there is no decode worker to hand over to."""
        if np.logical_or.reduce(self.decode):
            return self
        return self._replace(prefill=np.zeros_like(self.prefill))


class Capabilities(NamedTuple):
    """Facts about a cluster view that hold until a member joins, leaves, or changes role, memory or models.

    Read-only.
    """

    present: RoleMasks
    useful: RoleMasks  # `present.useful`
    is_complete: bool  # requests can be placed
    least_capacity_tokens: float  # of the present workers; inf if there is none
    most_capacity_tokens: float  # of all members so far; 0 if there was none
    may_keep: Bools  # decode workers that can compute prompts themselves, at a known speed
    knows_prefills: bool  # the prefill model of some worker
    knows_steps: bool  # the step model of some worker that decodes
    is_one_speed: bool  # workers of role `both` have equal prefill models
    is_one_step_time_of_both: bool  # and equal step models
    is_one_step_time_of_decode: bool  # decode workers have equal step models


def capabilities_of(
    present: RoleMasks,
    capacity_tokens: Floats,
    chunk_tokens: Floats,
    prefill_coefficients: Floats,
    step_coefficients: Floats,
) -> Capabilities:
    """Derives the capabilities from columns [num_rows] and coefficients [num_rows, 3]."""
    is_present = present.prefill | present.decode | present.both
    return Capabilities(
        present,
        present.useful,
        present.is_any,
        float(capacity_tokens[is_present].min(initial=math.inf)),
        float(capacity_tokens.max(initial=0.0)),
        present.decode & (chunk_tokens > 0) & prefill_coefficients.any(axis=1),
        bool(prefill_coefficients.any()),
        bool(step_coefficients[present.decode | present.both].any()),
        _are_equal(prefill_coefficients[present.both]),
        _are_equal(step_coefficients[present.both]),
        _are_equal(step_coefficients[present.decode]),
    )


def _are_equal(rows: Floats) -> bool:
    return bool((rows == rows[:1]).all())
