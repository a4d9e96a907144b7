"""The running steps of one simulated worker, and when they end."""

from __future__ import annotations

import math

from halfmoon.kv.kv_policy import effective_policy, num_pairs
from halfmoon.sim.cluster.contention import Work
from halfmoon.sim.latency_sources.host_memory import Cycle
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.prompt_queue import PromptChunk


class RunningSteps:
    """Owns the begin and end of the running steps. Knows nothing of queues or memory.

    Decode steps of an unchanged batch form one run. In the middle of a step with prompts others may run, one after the
    other: `nest`, then `resume`. `version` changes with `wake_s` and thereby marks older events as stale.
    """

    __slots__ = (
        "_block_tokens",
        "_cycle",
        "_cycles",
        "_decodes",
        "_is_stretched",
        "_latency",
        "_outer_s",
        "_prompts_s",
        "_stage_free_s",
        "begun_s",
        "num_planned",
        "pace",
        "passage_s",
        "version",
        "wake_s",
    )

    def __init__(self, latency: LatencyModel, decodes: DecodeBatch, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._latency = latency
        self._decodes = decodes
        self.version = 0
        self.begun_s = 0.0
        self.wake_s: float | None = None  # when they end, or the nested one does; None: idle
        self._outer_s: float | None = None  # what is left of the outer step; None: no nested one runs
        self._prompts_s = 0.0  # what the step with prompts takes, at pace 1, without nested ones
        self.passage_s = 0.0  # when the chunks that entered a pipeline last leave it
        self.num_planned = 0  # decode steps until `wake_s`; 0 for a step with prompts
        self.pace = 1.0  # seconds per second of the latency model
        self._is_stretched = False  # whether the run's last step deviates from the cycle
        self._cycles: dict[int, Cycle] = {}  # by batch size, at pace 1
        self._cycle = Cycle(0.0, 0.0)  # of the run, at its pace
        self._stage_free_s = [0.0] * latency.num_stages

    @property
    def work(self) -> Work | None:
        """The work in progress; None: idle."""
        if self.wake_s is None:
            return None
        return "decode" if self.num_planned else "prefill"

    @property
    def ends_s(self) -> float | None:
        """When they end, the outer step too; None: idle."""
        return None if self.wake_s is None else self.wake_s + (self._outer_s or 0.0)

    @property
    def is_pipeline(self) -> bool:
        """Whether prompts pass through pipeline stages."""
        return len(self._stage_free_s) > 1

    def most_in_run(self, num_steps: int) -> int:
        """Of `num_steps` decode steps, how many can be one run: those before the next bend of their times."""
        size, context, num_growing = self._decodes.size, self._decodes.context, self._decodes.num_growing
        num_steps = self._decodes.most_alike(num_steps)
        if self._latency.host is None or not num_growing:
            return num_steps
        before_bend = (self._latency.bend_after(size, context) - context) / num_growing
        return num_steps if before_bend >= num_steps else max(math.ceil(before_bend), 1)

    def begin_run(self, num_steps: int, now_s: float) -> None:
        """Begins `num_steps` decode steps of the whole batch, at most `most_in_run`."""
        size = self._decodes.size
        if self._latency.host is not None:
            cycle = self._latency.cycle(size, self._decodes.context)
        elif (known := self._cycles.get(size)) is not None:
            cycle = known
        else:
            cycle = self._cycles[size] = self._latency.cycle(size)
        pace = self.pace
        self._cycle = cycle if pace == 1.0 else Cycle(pace * cycle.base_s, pace * cycle.slope_s)
        self._is_stretched = False
        self.begun_s = now_s
        self._end_after(num_steps)

    def begin_prompts(self, sets: list[list[PromptChunk]], batch: int, context: int, now_s: float) -> None:
        """Begins a step with prompts. In a filled pipeline the sets follow each other, each with its share of the
        batch.
        """
        self._prompts_s = self._seconds(sets, batch, context)
        self._begin(now_s, now_s + self.pace * self._prompts_s)

    def left(self, now_s: float) -> float:
        """The share of the step with prompts that is still to be computed."""
        assert self.wake_s is not None, "idle"
        return (self.wake_s - now_s) / (self.pace * self._prompts_s) if self._prompts_s else 0.0

    def nest(self, chunks: list[PromptChunk], now_s: float) -> None:
        """Begins a step of prompts in the middle of the running one."""
        assert self.wake_s is not None, "idle"
        assert self._outer_s is None, "nested steps do not nest"
        self._outer_s = self.wake_s - now_s
        self._wake_at(now_s + self.pace * self._seconds([chunks], 0, 0))

    def resume(self, now_s: float) -> None:
        """Ends a nested step; the outer one goes on."""
        assert self._outer_s is not None, "no nested step runs"
        self._wake_at(now_s + self._outer_s)
        self._outer_s = None

    def _seconds(self, sets: list[list[PromptChunk]], batch: int, context: int) -> float:
        """What a step with prompts takes, at pace 1."""
        latency = self._latency
        stages = latency.num_stages
        groups = latency.num_groups(batch)
        longest_s = first_stage_s = 0.0
        for chunks in sets:
            new, pairs, seen = self._work(chunks)
            stage_s = latency.stage_s(new, pairs, batch / groups, context / groups)
            longest_s = max(longest_s, stages * stage_s + latency.launching_s(seen + context / groups))
            first_stage_s += stage_s + latency.launching_s(seen + context / groups)
        return max(longest_s, first_stage_s)

    def enter_pipeline(
        self, chunks: list[PromptChunk], now_s: float, batch: int = 0, context: int = 0, *, waits: bool = False
    ) -> None:
        """Sends chunks, and `batch` decodes beside them, through the pipeline. A stage starts when its predecessor and
        its own earlier chunks are done.

        `waits`: the step ends when its tokens are known, otherwise when the first stage is done.
        """
        latency, free_s = self._latency, self._stage_free_s
        new, pairs, seen = self._work(chunks)
        stage_s = self.pace * latency.stage_s(new, pairs, batch, context)
        at_s = now_s + self.pace * latency.launching_s(seen + context)
        for stage, stage_free_s in enumerate(free_s):
            at_s = free_s[stage] = max(at_s, stage_free_s) + stage_s
        self.passage_s = at_s
        self._begin(now_s, at_s if waits else free_s[0])

    def num_begun(self, now_s: float) -> int:
        """Steps of the run that have begun, which is the number of the running one."""
        return min(self._decodes.steps_begun(now_s - self.begun_s, self._cycle), self.num_planned)

    def cut(self, now_s: float) -> int:
        """Ends a run with its running step; returns the number of steps cut off."""
        planned = self.num_planned
        if planned <= 1 or self._is_stretched:
            return 0
        num = self.num_begun(now_s)
        if num < planned:
            self._end_after(num)
        return planned - num

    def split(self) -> None:
        """Books the steps of a run that have ended, so that the batch may lose jobs in the running one.

        The run must have been cut before.
        """
        num = self.num_planned
        if num > 1 and not self._is_stretched:
            ended_s = self._decodes.duration_s(num - 1, self._cycle)
            self._decodes.advance_run(num - 1, self.begun_s, self._cycle)
            self.begun_s += ended_s
            self.num_planned = 1
        self._is_stretched = True

    def finish(self, now_s: float) -> list[Job]:
        """Ends the running steps; returns the jobs of a run that now have all their tokens."""
        self.wake_s = None
        num, self.num_planned = self.num_planned, 0
        if not num:
            return []
        if not self._is_stretched:
            return self._decodes.advance_run(num, self.begun_s, self._cycle)
        if num > 1:
            self._decodes.advance_run(num - 1, self.begun_s, self._cycle)
        return self._decodes.advance(now_s)

    def abort(self, now_s: float) -> None:
        """Discards the running step. Earlier steps of its run count."""
        if self.num_planned:
            self._decodes.advance_run(self.num_begun(now_s) - 1, self.begun_s, self._cycle)
        self.wake_s = self._outer_s = None
        self.num_planned = 0
        self.version += 1
        self._stage_free_s = [0.0] * len(self._stage_free_s)

    def set_pace(self, pace: float, now_s: float) -> bool:
        """Stretches or shrinks the rest of the running steps; False if idle. A run must have been cut before.

        Chunks that are in a pipeline keep their pace.
        """
        ratio, self.pace = pace / self.pace, pace
        if self.wake_s is None:
            return False
        self._wake_at(now_s + (self.wake_s - now_s) * ratio)
        if self._outer_s is not None:
            self._outer_s *= ratio
        self._is_stretched = True
        return True

    def _end_after(self, num_steps: int) -> None:
        self.num_planned = num_steps
        self._wake_at(self.begun_s + self._decodes.duration_s(num_steps, self._cycle))

    def _begin(self, now_s: float, wake_s: float) -> None:
        self.begun_s = now_s
        self._wake_at(wake_s)

    def _wake_at(self, wake_s: float) -> None:
        self.wake_s = wake_s
        self.version += 1

    def _work(self, chunks: list[PromptChunk]) -> tuple[int, float, int]:
        """New tokens, their attention pairs, and the total length of the sequences."""
        new, pairs, seen = 0, 0.0, 0
        for job, _, cached, num_tokens in chunks:
            new += num_tokens
            policy = effective_policy(job.policy, job.prompt, cached)
            pairs += num_pairs(policy, cached, num_tokens, self._block_tokens)
            seen += cached + num_tokens
        return new, pairs, seen
