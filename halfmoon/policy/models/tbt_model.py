"""How fast an answer comes where prompts are computed meanwhile: in the same steps, or on the same cores."""

from __future__ import annotations

from collections.abc import Iterable

_LEAST_MS, _MOST_MS = 10, 10_000  # that anybody is told to wait for room


def pace_among_prompts(step_s: float, chunk_s: float, prompts_s: float, num_gaps: float) -> float:
    """Mean seconds between tokens, where every step has a token, and a chunk of a prompt as long as there is one.

    step_s: without prompts; chunk_s: what a chunk adds; prompts_s: computing those that are there when the answer
    begins, and those that come before it ends.
    """
    return min(step_s + prompts_s / num_gaps, step_s + chunk_s)


def pace_beside(step_s: float, contention: float, usual: float, behind_s: float, num_gaps: float) -> float:
    """Mean seconds between tokens beside neighbours, each of which adds `contention` of `step_s` while it is busy.

    usual: so many of them are busy on average; behind_s: so long one of them is for sure from the beginning on.
    """
    length_s = step_s * (1 + contention * usual) * num_gaps
    sure = min(behind_s / length_s, 1.0)
    return step_s * (1 + contention * (usual + sure * max(1 - usual, 0.0)))


def room_in_ms(step_s: float, steps_left: Iterable[int]) -> int:
    """When the first of those that decode, by the steps that each has left, will have made room: a time to come again.

    step_s: of the last step. With nobody there it is a step.
    """
    return min(max(int(1000 * step_s * min(steps_left, default=1)), _LEAST_MS), _MOST_MS)
