"""TBT of an answer next to prefill work: in the same steps, or on the same cores."""

from __future__ import annotations


def tbt_among_prompts(step_s: float, chunk_s: float, prompts_s: float, num_gaps: float) -> float:
    """Mean TBT where each step also computes a chunk of a prompt as long as there is one.

    step_s: a step without prompts; chunk_s: what a chunk adds; prompts_s: work of the prompts that are there when the
    answer begins or arrive before it ends.
    """
    return min(step_s + prompts_s / num_gaps, step_s + chunk_s)


def tbt_with_interference(step_s: float, contention: float, usual: float, behind_s: float, num_gaps: float) -> float:
    """Mean TBT next to colocated workers, each of which adds `contention * step_s` to a step while it is busy.

    usual: mean number of busy ones; behind_s: how long one is certainly busy from the beginning of the answer.
    """
    length_s = step_s * (1 + contention * usual) * num_gaps
    sure = min(behind_s / length_s, 1.0)
    return step_s * (1 + contention * (usual + sure * max(1 - usual, 0.0)))
