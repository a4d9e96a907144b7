"""A layout that may be among the best, before it is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with what it is thought to hold, and what it cannot exceed, in requests a second."""

    layout: Layout
    guess_per_s: float
    bound_per_s: float
