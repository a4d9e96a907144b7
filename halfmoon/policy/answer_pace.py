"""How fast an answer comes from a worker that goes on computing prompts."""

from __future__ import annotations


def pace_among_prompts(step_s: float, chunk_s: float, share: float, behind_s: float, num_gaps: float) -> float:
    """Mean seconds between tokens, where every step has a token, and a chunk of a prompt as long as there is one.

    step_s: without prompts; chunk_s: what a chunk adds; share: of the time, for the prompts that usually come;
    behind_s: of computing those that are there when the answer begins. Those that come while others are computed are
    left out: mostly none do, and where they do it is many.
    """
    return min(step_s * (1 + share) + behind_s / num_gaps, step_s + chunk_s)
