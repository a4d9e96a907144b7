"""What the workers' engines have done since this gateway knows them, whoever has left since."""

from __future__ import annotations

from bisect import bisect_left

from halfmoon.pb.gateway_pb2 import WorkerLoad

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper edges; vLLM's


class EngineTotals:
    """Owns the counts. A worker reports its latest steps to one of its gateways: with several, each has a part."""

    def __init__(self) -> None:
        self.num_preempted = 0
        self.step_tokens = 0  # of all steps together
        self.num_steps = [0] * (len(STEP_TOKENS) + 1)  # by tokens: prompt tokens computed, and one for each decode

    def note(self, before: WorkerLoad, load: WorkerLoad) -> None:
        """Takes a worker's report; `before` is the one before, of which a worker's first has none (sequence 0)."""
        if before.sequence:
            self.num_preempted += max(0, load.num_preempted_total - before.num_preempted_total)
        for step in load.steps:
            num_tokens = step.batch + step.drafts + step.prefill_tokens
            self.step_tokens += num_tokens
            self.num_steps[bisect_left(STEP_TOKENS, num_tokens)] += 1
