"""The course of one prefill worker's prompts: its steps, as its scheduler forms them, until a prompt's token."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from halfmoon.policy.forecast.arrivals import ArrivalRate
from halfmoon.policy.forecast.colocated_decodes import NO_LIVES, ColocatedDecodes
from halfmoon.policy.forecast.colocated_workers import ColocatedWorkers, Decoding
from halfmoon.policy.forecast.pending_prompts import PendingPrompts
from halfmoon.policy.forecast.prefill_step import PredictedChunk, Prompt, by_rank, form_step, sizes, work_s
from halfmoon.policy.forecast.running_steps import RunningStep
from halfmoon.policy.models.latency import PrefillModel, StepModel

_MAX_STEPS = 512  # looked ahead; who is not computed by then waits as others predict it
_MAX_LOOKS = 4_000  # at prompts, over all steps: about a millisecond, which every other request waits for, too
_OVERDUE = 0.05  # of a step that should be over: how much of it may be left
_UNKNOWN = 0.5  # of a decode step: how much of it is over, on average


class Speed(NamedTuple):
    """How fast a worker computes, alone and beside others."""

    model: PrefillModel
    step_tokens: int
    contention: float = 0.0  # what each busy neighbour adds, as a share of the time alone
    chunk_tokens: int = 0  # in place of `step_tokens` where it decodes, too

    def room(self, decode_s: float) -> int:
        """Prompt tokens of a step in which decoding takes so long."""
        return self.chunk_tokens if decode_s > 0 else self.step_tokens

    def beside_decodes_s(self, num_tokens: int) -> float:
        """Computing so many tokens in chunks; the decoding that these share their steps with is not in it."""
        num_more = math.ceil(num_tokens / self.chunk_tokens) - 1
        return self.model.seconds(num_tokens) + self.model.a * num_more


class Prefill(NamedTuple):
    """One prompt's work on the worker."""

    new_tokens: int  # to be computed
    known_tokens: int  # before them
    priority: int
    ready_s: float  # what is restored of it is there


class Times(NamedTuple):
    """Of one prompt, predicted."""

    begins_s: float
    ends_s: float
    behind_tokens: int = 0  # of others that are there, not computed by then


class PrefillQueueModel:
    """Owns the prompts of this gateway that one worker has not computed yet, and the step that it is at.

    Steps are formed as `engine/scheduler.py` forms them: by rank; what does not fit into a step leaves half of it to
    shorter prompts of its priority. The step under way ends when the first token of a prompt in it is here.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._num_joined = 0
        self.num_tokens = 0  # still to be computed, as of the last step that ended
        self._cached: dict[str, int] = {}  # tokens that need no computing, of prompts that no step had
        self._num_cached = 0
        self._arrivals = ArrivalRate()
        self._step: list[PredictedChunk] = []
        self._step_began_s = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def request_ids(self) -> Collection[str]:
        """Whose prompts are here."""
        return self._prompts.keys()

    @property
    def num_reported(self) -> int:
        """Tokens of these prompts that the worker says wait there: whole prompts, until it looks what caches have."""
        return self.num_tokens + self._num_cached

    @property
    def step_began_s(self) -> float:
        """When the step under way began."""
        return self._step_began_s

    @property
    def step(self) -> RunningStep:
        """That step."""
        return RunningStep(self._step_began_s, *sizes(self._step))

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return bool(self._step)

    def usual_work_s(self, speed: Speed, seconds: float, now_s: float) -> float:
        """Computing the prompts that usually come within so long a time, beside decoding."""
        return self._arrivals.work_s(speed, seconds, now_s)

    def join(self, request_id: str, work: Prefill, decoding: Decoding | None, step_tokens: int, now_s: float) -> None:
        """A prompt is sent there. `step_tokens` counts where no step is under way."""
        self._num_joined += 1
        self.num_tokens += work.new_tokens
        self._cached[request_id] = work.known_tokens
        self._num_cached += work.known_tokens
        self._arrivals.add(work.new_tokens, now_s)
        self._prompts[request_id] = Prompt(request_id, self._num_joined, *work, decoding)
        if not self._step:
            self._begin(now_s, step_tokens)

    def computed(self, request_id: str, step_tokens: int, now_s: float) -> None:
        """Its first token is here: a step ended. `step_tokens` counts where others wait."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        if any(chunk.prompt is prompt for chunk in self._step):
            self._end_step()
        if self._prompts.pop(request_id, None) is not None:
            self.num_tokens -= prompt.new_tokens
            self._is_looked_at(request_id)
        self._begin(now_s, step_tokens)

    def remove(self, request_id: str, step_tokens: int, now_s: float) -> None:
        """It is elsewhere, or given up. What is under way goes on."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self.num_tokens -= prompt.new_tokens
            self._is_looked_at(request_id)
            self._step = [chunk for chunk in self._step if chunk.prompt.request_id != request_id]
            if not self._step:
                self._begin(now_s, step_tokens)

    def advance(self, speed: Speed, past_busy: float, now_s: float, decode_s: float = 0.0) -> None:
        """Steps that must be over by now, with so many neighbours busy since `step_began_s`, and decoding taking
        so long of each. One that a prompt's token comes of is over when that is here."""
        slowdown = 1 + speed.contention * past_busy
        step_tokens = speed.room(decode_s)
        self._begin_restored(step_tokens, now_s)
        while self._step and not any(chunk.num_tokens == chunk.prompt.new_tokens for chunk in self._step):
            ends_s = self._step_began_s + slowdown * (work_s(self._step, speed.model) + decode_s)
            if ends_s > now_s:
                return
            self._end_step()
            self._begin(ends_s, step_tokens)
            self._begin_restored(step_tokens, now_s)

    def is_in_step(self, speed: Speed, now_s: float) -> bool:
        """Whether `advance` would change nothing, whatever decoding and neighbours add."""
        if not self._prompts or now_s < self._step_began_s + work_s(self._step, speed.model):
            return True
        return any(chunk.num_tokens == chunk.prompt.new_tokens for chunk in self._step)

    def predict(
        self,
        work: Prefill,
        speed: Speed,
        neighbours: ColocatedWorkers,
        past_busy: float,
        ahead_s: float,
        now_s: float,
        own: ColocatedDecodes | None = None,
    ) -> Times | None:
        """When such a prompt would begin and end, were it sent now; None where that is too far ahead.

        `past_busy` is as for `advance`; `ahead_s` is what the worker has to do for others first, alone; `own` is who
        decodes in the same steps, None where nobody ever does.
        """
        mine = order = self._num_joined + 1
        queue = PendingPrompts([*self._prompts.values(), Prompt("", order, *work, None)])
        step, left_tokens, num_looks = self._step, work.new_tokens, 0
        behind_tokens = self.num_tokens - _num_of_others(step)
        begins_s, to_come = math.inf, None
        own = own or ColocatedDecodes(-1, NO_LIVES, StepModel())
        decode_s = own.step_s(now_s)
        step_s = work_s(step, speed.model) + decode_s
        done_s = (now_s - self._step_began_s) / (1 + speed.contention * past_busy) if step else _UNKNOWN * step_s
        time_s = neighbours.after(max(step_s - done_s, _OVERDUE * step_s) + ahead_s, now_s, speed.contention)
        for _ in range(_MAX_STEPS):
            for computed in queue.end(step):
                neighbours.decode(computed.decoding, time_s)
                own.decode(computed.decoding, time_s)
            decode_s = own.step_s(time_s)
            step = queue.next_step(speed.room(decode_s), time_s)
            if not step:  # all wait for what is restored
                time_s = queue.ready_s
                decode_s = own.step_s(time_s)
                step = queue.next_step(speed.room(decode_s), time_s)
            num_mine = _num_of(mine, step)
            if num_mine and begins_s == math.inf:
                begins_s = time_s
            began_s = time_s
            time_s = neighbours.after(work_s(step, speed.model) + decode_s, time_s, speed.contention)
            left_tokens -= num_mine
            behind_tokens -= _num_of_others(step)
            if not left_tokens:
                return Times(begins_s, time_s, behind_tokens)
            if to_come is None:  # most are computed with the first step
                to_come = self._arrivals.to_come(work.new_tokens, now_s)
            for num_tokens in to_come.within(time_s - began_s):
                order += 1
                queue.add(Prompt("", order, num_tokens, 0, work.priority, -math.inf, None))
            num_looks += len(queue)
            if num_looks > _MAX_LOOKS:
                break
        return None

    def earliest_s(self, least: Prefill, speed: Speed, ahead_s: float, now_s: float) -> float:
        """Before which no prompt of that priority, with as much work or more, has its token, wherever it fits in: it
        waits for the step under way, and for all that goes before it and is ready by then. That are also those of its
        priority that are no longer: shares of a step go to the shortest first."""
        model, step_s, under_way = (
            speed.model,
            work_s(self._step, speed.model),
            {prompt.request_id: num for prompt, num in self._step},
        )
        begins_s = now_s + max(step_s - (now_s - self._step_began_s), _OVERDUE * step_s) + ahead_s
        rank = (least.priority, least.new_tokens)
        num_tokens = least.new_tokens
        num_pairs = num_tokens * (least.known_tokens + num_tokens / 2)
        for prompt in self._prompts.values():
            done = under_way.get(prompt.request_id, 0)
            new_tokens, known_tokens = prompt.new_tokens - done, prompt.known_tokens + done
            if (prompt.priority, new_tokens) <= rank and prompt.ready_s <= begins_s:
                num_tokens += new_tokens
                num_pairs += new_tokens * (known_tokens + new_tokens / 2)
        num_steps = math.ceil(num_tokens / max(speed.step_tokens, speed.chunk_tokens))
        return begins_s + model.a * num_steps + model.b * num_tokens + model.c * num_pairs

    def _is_looked_at(self, request_id: str) -> None:
        self._num_cached -= self._cached.pop(request_id, 0)

    def _end_step(self) -> None:
        for prompt, num_tokens in self._step:
            self._is_looked_at(prompt.request_id)
            prompt.new_tokens -= num_tokens
            prompt.known_tokens += num_tokens
            self.num_tokens -= num_tokens
            if not prompt.new_tokens:
                self._prompts.pop(prompt.request_id, None)

    def _begin_restored(self, step_tokens: int, now_s: float) -> None:
        """Where all waited for what is restored, the first one whose prefix is there by now began as it came."""
        ready_s = min((prompt.ready_s for prompt in self._prompts.values()), default=math.inf)
        if not self._step and ready_s <= now_s:
            self._begin(max(ready_s, self._step_began_s), step_tokens)

    def _begin(self, now_s: float, step_tokens: int) -> None:
        self._step = form_step(by_rank(self._prompts.values()), step_tokens, now_s)
        self._step_began_s = now_s


def _num_of(order: int, step: Sequence[PredictedChunk]) -> int:
    """Tokens of a step that are of that prompt."""
    for prompt, num_tokens in step:
        if prompt.order == order:
            return num_tokens
    return 0


def _num_of_others(step: Sequence[PredictedChunk]) -> int:
    """Tokens of a step that are of prompts that are there."""
    return sum([num_tokens for prompt, num_tokens in step if prompt.request_id])
