"""The queue of one prefill worker, step by step as its scheduler forms the steps, until a prompt's first token."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from halfmoon.policy.forecast.arrivals import ArrivalRate
from halfmoon.policy.forecast.colocated_decodes import ColocatedDecodes
from halfmoon.policy.forecast.colocated_workers import ColocatedWorkers, Decoding
from halfmoon.policy.forecast.nested_steps import NestedSteps, Turn
from halfmoon.policy.forecast.pending_prompts import PendingPrompts
from halfmoon.policy.forecast.prefill_step import (
    PredictedChunk,
    Prompt,
    PromptWork,
    Speed,
    StepRoom,
    by_rank,
    form_step,
    full_steps_s,
    queued_tokens,
    sizes,
    tokens_of,
    work_s,
)
from halfmoon.policy.forecast.running_steps import NO_STEP, RunningStep
from halfmoon.policy.models.chunk_length import NO_STEP_DECODES, StepDecodes
from halfmoon.policy.models.latency import num_pairs
from halfmoon.policy.nested_step import OuterStep

_MAX_STEPS = 256  # of look-ahead; the rest of the prompts is summed up
_MAX_LOOKS = 600  # at prompts and steps: two or three milliseconds, which delay every other request
_OVERDUE = 0.05  # share of an overdue step that is assumed to be left
_UNKNOWN = 0.5  # share of a running decode step that is over, on average


class PredictedTimes(NamedTuple):
    """When a prompt is computed."""

    begins_s: float
    ends_s: float
    behind_tokens: int = 0  # of other queued prompts, not computed by `ends_s`


class PrefillQueueModel:
    """Owns the prompts of this gateway that one worker has not computed yet, and its running step.

    Steps are formed as the engine's `Scheduler` forms them: by rank; a long prompt shares them with shorter ones of its
    priority. The running step ends when the first token of a prompt in it arrives. Where the worker nests steps, short
    prompts that come meanwhile run in the middle of it.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._num_joined = 0
        self.num_tokens = 0  # not computed as of the end of the latest step
        self._cached: dict[str, int] = {}  # cached tokens by request, for prompts not started
        self._arrivals = ArrivalRate()
        self._step: list[PredictedChunk] = []
        self._step_began_s = 0.0
        self._num_before = 0  # prompts that had joined when it began
        self._nested = NestedSteps()  # of the running step
        self._nests_steps = False  # as of the latest prompt

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def request_ids(self) -> Collection[str]:
        """Requests whose prompts are queued."""
        return self._prompts.keys()

    @property
    def num_reported(self) -> int:
        """Tokens of these prompts as the worker reports them: whole prompts until it has looked at its caches."""
        return self.num_tokens + sum(self._cached.values())

    @property
    def step_began_s(self) -> float:
        """When the running step began."""
        return self._step_began_s

    @property
    def step(self) -> RunningStep:
        """The running step."""
        if not self._step:
            return NO_STEP
        num_tokens, pairs = sizes(self._step)
        most_nested = OuterStep(num_tokens, len(self._step), 1.0).most_tokens if self._nests_steps else 0
        return RunningStep(self._step_began_s, num_tokens, pairs, most_nested)

    @property
    def is_computing(self) -> bool:
        """Whether a step is running."""
        return bool(self._step)

    def usual_work_s(self, speed: Speed, seconds: float, now_s: float) -> float:
        """Seconds to compute, in chunks, the prompts that usually arrive within `seconds`."""
        return self._arrivals.work_s(speed, seconds, now_s)

    def known_tokens(self, now_s: float) -> int:
        """Tokens known of the first prompt of a step that begins now; 0 without one."""
        first = next((prompt for prompt in by_rank(self._prompts.values()) if prompt.ready_s <= now_s), None)
        return first.known_tokens if first else 0

    def join(
        self,
        request_id: str,
        work: PromptWork,
        decoding: Decoding | None,
        room: StepRoom,
        now_s: float,
        speed: Speed,
        past_busy: float = 0.0,
    ) -> None:
        """Adds a prompt. `room` is that of a step that begins now, if none is running.

        `past_busy` is as for `advance`; it counts where the worker nests steps.
        """
        self._nests_steps = speed.nests_steps
        if speed.nests_steps and (turn := self._turn(work, speed, past_busy, now_s)):
            takes_s = turn.adds_s * (1 + speed.contention * past_busy)
            self._nested.add(request_id, work.new_tokens, takes_s, turn)
        self._num_joined += 1
        self.num_tokens += work.new_tokens
        self._cached[request_id] = work.known_tokens
        self._arrivals.add(work.new_tokens, now_s)
        self._prompts[request_id] = Prompt(request_id, self._num_joined, *work, decoding)
        if not self._step:
            self._begin(now_s, room)

    def computed(self, request_id: str, room: StepRoom, now_s: float) -> None:
        """Notes the first token of a prompt, and so the end of a step. `room` is that of the next one.

        Where the worker nests steps, the running one goes on if the prompt is not in it and came since it began.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        is_nested = self._nested.computed(request_id, now_s)
        if any(chunk.prompt is prompt for chunk in self._step):
            self._end_step()
        else:
            is_nested |= self._nests_steps and bool(self._step) and prompt.order > self._num_before
        if self._prompts.pop(request_id, None) is not None:
            self.num_tokens -= prompt.new_tokens
            self._cached.pop(request_id, None)
        if not is_nested:
            self._begin(now_s, room)

    def remove(self, request_id: str, room: StepRoom, now_s: float) -> None:
        """Removes a prompt that moved or was given up. The running step goes on."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self.num_tokens -= prompt.new_tokens
            self._cached.pop(request_id, None)
            self._nested.remove(request_id, now_s)
            self._step = [chunk for chunk in self._step if chunk.prompt.request_id != request_id]
            if not self._step:
                self._begin(now_s, room)

    def advance(
        self,
        speed: Speed,
        past_busy: float,
        now_s: float,
        decode_s: float = 0.0,
        beside: StepDecodes = NO_STEP_DECODES,
    ) -> None:
        """Ends the steps that must be over by now; one that completes a prompt is over when its first token arrives.

        `past_busy` is the mean number of busy colocated workers since `step_began_s`, `decode_s` the decode part of
        each step, which is that of `beside`.
        """
        slowdown = 1 + speed.contention * past_busy
        room = speed.step_room(beside, self.known_tokens(now_s))
        self._begin_restored(room, now_s)
        while self._step and not any(chunk.num_tokens == chunk.prompt.new_tokens for chunk in self._step):
            step_s = slowdown * (work_s(self._step, speed.model) + decode_s)
            ends_s = self._step_began_s + self._nested.seconds + step_s
            if ends_s > now_s:
                return
            self._end_step()
            room = speed.step_room(beside, self.known_tokens(ends_s))
            self._begin(ends_s, room)
            self._begin_restored(room, now_s)

    def is_in_step(self, speed: Speed, now_s: float) -> bool:
        """Whether `advance` would change nothing, whatever decodes and interference add."""
        began_s = self._step_began_s + self._nested.seconds
        if not self._prompts or now_s < began_s + work_s(self._step, speed.model):
            return True
        return any(chunk.num_tokens == chunk.prompt.new_tokens for chunk in self._step)

    def predict(
        self,
        work: PromptWork,
        speed: Speed,
        colocated: ColocatedWorkers,
        past_busy: float,
        ahead_s: float,
        now_s: float,
        decodes: ColocatedDecodes,
    ) -> PredictedTimes:
        """When a prompt sent now would start and end.

        `past_busy` is as for `advance`; `ahead_s` is work of other gateways that comes first; `decodes` are the
        requests that decode in the same steps.
        """
        if speed.nests_steps and (turn := self._turn(work, speed, past_busy, now_s)):
            ends_s = colocated.after(turn.adds_s, turn.ends_s, speed.contention)
            return PredictedTimes(turn.begins_s, ends_s, self.num_tokens - queued_tokens(self._nested_chunks()))
        mine = order = self._num_joined + 1
        queue = PendingPrompts([*self._prompts.values(), Prompt("", order, *work, None)])
        step, left_tokens, num_looks = self._step, work.new_tokens, 0
        begins_s, expected = math.inf, None
        decode_s = decodes.step_s(now_s)
        step_s = work_s(step, speed.model) + decode_s
        done_s = _UNKNOWN * step_s
        if step:
            done_s = (now_s - self._step_began_s - self._nested.seconds) / (1 + speed.contention * past_busy)
            if self._nested.num_tokens:
                step = [*step, *self._nested_chunks()]
        behind_tokens = self.num_tokens - queued_tokens(step)
        time_s = colocated.after(max(step_s - done_s, _OVERDUE * step_s) + ahead_s, now_s, speed.contention)
        for _ in range(_MAX_STEPS):
            for computed in queue.end(step):
                colocated.begin_decode(computed.decoding, time_s)
                decodes.begin_decode(computed.decoding, time_s)
            if queue.known_tokens(time_s) is None:  # all wait for restored blocks
                time_s = queue.ready_s
            decode_s, beside = decodes.step_s(time_s), decodes.in_step(time_s)
            step = queue.next_step(speed.step_room(beside, queue.known_tokens(time_s) or 0), time_s)
            num_mine = tokens_of(mine, step)
            if num_mine and begins_s == math.inf:
                begins_s = time_s
            began_s = time_s
            time_s = colocated.after(work_s(step, speed.model) + decode_s, time_s, speed.contention)
            left_tokens -= num_mine
            behind_tokens -= queued_tokens(step)
            if not left_tokens:
                return PredictedTimes(begins_s, time_s, behind_tokens)
            if expected is None:  # most prompts end with the first step
                expected = self._arrivals.expected(work.new_tokens, now_s)
            for num_tokens in expected.within(time_s - began_s):
                order += 1
                queue.add(Prompt("", order, num_tokens, 0, work.priority, -math.inf, math.inf, None))
            num_looks += 1 + len(step)
            if num_looks > _MAX_LOOKS:
                break
        queue.end(step)
        rest = queue.until(mine)
        ends_s = colocated.after(full_steps_s(rest, speed, decode_s, beside), time_s, speed.contention)
        begins_s = min(begins_s, max(ends_s - work_s(rest[-1:], speed.model), time_s))
        return PredictedTimes(begins_s, ends_s, behind_tokens - queued_tokens(rest))

    def earliest_s(self, work: PromptWork, speed: Speed, ahead_s: float, now_s: float, past_busy: float = 0.0) -> float:
        """Lower bound on the time of the first token of any prompt with that priority and at least this work.

        Such a prompt waits for the running step, and for all prompts that go before it and are ready by then. This
        includes prompts of equal priority that are not longer, since shared steps serve the shortest first. If it may
        run nested, it waits for the nested step that runs; `past_busy` is as for `predict`.
        """
        model, step_s = speed.model, work_s(self._step, speed.model)
        running = {prompt.request_id: num_tokens for prompt, num_tokens in self._step}
        if self._nested.num_tokens:
            running |= {prompt.request_id: num_tokens for prompt, num_tokens in self._nested_chunks()}
        done_s = max(now_s - self._step_began_s - self._nested.seconds, 0.0)
        begins_s = now_s + max(step_s - done_s, _OVERDUE * step_s) + ahead_s
        rank = (work.priority, work.new_tokens)
        num_tokens = work.new_tokens
        pairs = num_pairs(work.known_tokens, num_tokens, work.most_seen)
        for prompt in self._prompts.values():
            done = running.get(prompt.request_id, 0)
            new_tokens, known_tokens = prompt.new_tokens - done, prompt.known_tokens + done
            if (prompt.priority, new_tokens) <= rank and prompt.ready_s <= begins_s:
                num_tokens += new_tokens
                pairs += num_pairs(known_tokens, new_tokens, prompt.most_seen)
        num_steps = math.ceil(num_tokens / max(speed.step_tokens, speed.chunk_tokens))
        ends_s = begins_s + model.a * num_steps + model.b * num_tokens + model.c * pairs
        turn = self._turn(work, speed, past_busy, now_s) if speed.nests_steps else None
        return ends_s if turn is None else min(ends_s, turn.ends_s + turn.adds_s)

    def _turn(self, work: PromptWork, speed: Speed, past_busy: float, now_s: float) -> Turn | None:
        """The nested step in which a prompt would run that comes now; None if it would not."""
        if not self._step:
            return None
        slowdown = 1 + speed.contention * past_busy
        queued = self._prompts.values()
        return self._nested.turn(work, queued, self._step, self._step_began_s, speed, slowdown, now_s)

    def _nested_chunks(self) -> list[PredictedChunk]:
        prompts = [self._prompts[request_id] for request_id in self._nested.request_ids]
        return [PredictedChunk(prompt, prompt.new_tokens) for prompt in prompts]

    def _end_step(self) -> None:
        for prompt, num_tokens in self._step:
            self._cached.pop(prompt.request_id, None)
            prompt.new_tokens -= num_tokens
            prompt.known_tokens += num_tokens
            self.num_tokens -= num_tokens
            if not prompt.new_tokens:
                self._prompts.pop(prompt.request_id, None)

    def _begin_restored(self, room: StepRoom, now_s: float) -> None:
        """If all prompts waited for restored blocks, starts a step when the first of them became ready."""
        ready_s = min((prompt.ready_s for prompt in self._prompts.values()), default=math.inf)
        if not self._step and ready_s <= now_s:
            self._begin(max(ready_s, self._step_began_s), room)

    def _begin(self, now_s: float, room: StepRoom) -> None:
        self._step = form_step(by_rank(self._prompts.values()), room, now_s)
        self._step_began_s, self._num_before = now_s, self._num_joined
        if self._nested.num_tokens:
            self._nested = NestedSteps()
