"""How hard the phases of a cluster are pressed: demand over what a ratio of roles can serve within the targets.

A pressure of 1 is the most that meets the targets. It follows from the workers' latency models:

    prefill   = (arriving work + queue / clear + tail) / workers
    tail      = -ln(1 - attainment) * work of a prompt / (TTFT target - work of a prompt)
    decode    = tokens a second / (workers * tokens a second of one at the TPOT target)

`tail` is what the wait of M/M/c leaves free for the share `attainment` of prompts to begin in time. A worker of role
`both` gives a share of its time to prompts; its decode steps then have the rest of the TPOT target. The share is the
one that presses both phases equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.policy.scaling.observation import Observation, Split, WorkerSpeed
from halfmoon.policy.view.worker_view import Role

_SHARES = 20  # parts of a colocated worker's time that are tried
_IDLE_S = 1e-9


class Demand(NamedTuple):
    """What the cluster is asked to do."""

    work_per_s: float  # seconds of prefill on one idle worker, a second
    prompt_s: float  # of one prompt
    tokens_per_s: float  # of answers
    context_tokens: float  # of a sequence that decodes, in the mean


class Pressure(NamedTuple):
    """Demand over capacity of each phase; above 1 its target is missed."""

    prefill: float
    decode: float

    @property
    def most(self) -> float:
        """The pressure of the phase that is pressed harder."""
        return max(self)

    @property
    def phase(self) -> str:
        """The phase that is pressed harder."""
        return "prefill" if self.prefill >= self.decode else "decode"


class Capacity:
    """Owns nothing: computes pressures from one worker's speed and the targets."""

    def __init__(self, speed: WorkerSpeed, ttft_s: float, tpot_s: float, attainment: float) -> None:
        self._speed = speed
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s
        self._tail = -math.log1p(-min(attainment, 0.999))

    def pressure(self, split: Split, demand: Demand) -> Pressure:
        """The least pressure of the phase that is pressed harder, over the shares of colocated workers' time."""
        prefill_s = demand.work_per_s + self._tail_of(demand)
        alone = split.decode * self.tokens_per_s(demand.context_tokens)
        if not split.both:
            return Pressure(_ratio(prefill_s, split.prefill), _ratio(demand.tokens_per_s, alone))
        tried = []
        for number in range(_SHARES):
            share = number / _SHARES
            beside = split.both * self.tokens_per_s(demand.context_tokens, share)
            prefill = _ratio(prefill_s, split.prefill + split.both * share)
            tried.append(Pressure(prefill, _ratio(demand.tokens_per_s, alone + beside)))
        return min(tried, key=lambda pressure: pressure.most)

    def best(self, split: Split, demand: Demand, roles: Iterable[Role]) -> Split:
        """The split of as many workers that is pressed least, reached by changes each of which relieves."""
        least, roles = self.pressure(split, demand).most, tuple(roles)
        for _ in range(split.total):
            nearby = [(self.pressure(changed, demand).most, changed) for _, _, changed in split.changes(roles)]
            pressure, changed = min(nearby, default=(least, split))
            if not pressure < least:
                break
            split, least = changed, pressure
        return split

    def tokens_per_s(self, context_tokens: float, prompt_share: float = 0.0) -> float:
        """Tokens a second of one worker at the TPOT target, while prompts take `prompt_share` of its time."""
        step, speed = self._speed.step, self._speed
        per_sequence = step.e + step.f * context_tokens
        most = min(speed.max_running, speed.kv_tokens / max(context_tokens, 1.0))
        step_s = self._tpot_s * (1 - prompt_share)
        if math.isfinite(step_s):
            most = min(most, (step_s - step.d) / per_sequence if per_sequence else math.inf)
        if most <= 0 or math.isinf(most):
            return 0.0 if most <= 0 else math.inf
        return most * (1 - prompt_share) / max(step.d + per_sequence * most, _IDLE_S)

    def _tail_of(self, demand: Demand) -> float:
        left_s = self._ttft_s - demand.prompt_s
        if not demand.work_per_s or math.isinf(left_s):
            return 0.0
        return self._tail * demand.prompt_s / max(left_s, 0.1 * self._ttft_s)


def demand_of(seen: Observation, num_sequences: float, clear_s: float) -> Demand:
    """The demand that an observation shows. `num_sequences` will decode; queues are to be gone in `clear_s`."""
    traffic, speed, split = seen.traffic, seen.speed, seen.split
    seconds = max(traffic.seconds, 1.0)
    prompt_s = traffic.work_s / traffic.num_requests if traffic.num_requests else 0.0
    queue_s = speed.prefill.b * sum(worker.waiting_tokens for worker in seen.workers)
    usual_s = prompt_s * max(split.prefill + split.both, 1)  # each has one under way
    running = sum(worker.num_running for worker in seen.workers)
    context = sum(worker.context_tokens for worker in seen.workers) / running if running else 0.0
    decoding = max(split.decode + split.both, 1)
    step_s = speed.step.seconds(num_sequences / decoding, num_sequences / decoding * context)
    tokens_per_s = num_sequences / step_s if step_s > 0 else 0.0
    return Demand(traffic.work_s / seconds + max(queue_s - usual_s, 0.0) / clear_s, prompt_s, tokens_per_s, context)


def _ratio(demand: float, capacity: float) -> float:
    if demand <= 0:
        return 0.0
    return demand / capacity if capacity > 0 else math.inf
