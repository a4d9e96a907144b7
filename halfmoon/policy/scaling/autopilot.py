"""Decides which worker serves which role next, and when more or fewer workers are needed: a pure core."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from halfmoon.policy.admission.token_bucket import TokenBucket
from halfmoon.policy.scaling.observation import Observation, ObservedWorker, Split, Traffic
from halfmoon.policy.scaling.pressure import Capacity, Demand, Pressure, demand_of
from halfmoon.policy.scaling.rules import ScalingRules
from halfmoon.policy.view.worker_view import ROLES, Role

Action = Literal["hold", "change_role", "add_worker", "remove_worker", "cannot_be_met"]
_HOUR_S = 3600.0
_MOST_KNOWN = 10_000  # workers, those that left included
_TREND_S = 6.0  # of sequences that decode
_SETTLED = 3.0  # times the gain that taking a change back must promise, all changes up to the target together


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, why, and what is predicted of it."""

    action: Action
    reason: str
    split: Split
    target: Split  # where changes lead to
    demand: Demand
    pressure: Pressure  # now
    predicted: Pressure  # after this change; as now without one
    worker_id: str = ""  # of a change
    role: Role | None = None  # that it is to have
    epoch: int = 0  # of its present role
    num_needed: int = 0  # workers that would meet the targets, where these do not

    @property
    def changes(self) -> bool:
        """Whether something is to be done."""
        return self.action not in ("hold", "cannot_be_met")


class Advice(NamedTuple):
    """What the slow loop expects until `until_s`."""

    demand: Demand
    target: Split | None  # the split that did best in the simulator; None: what the pressures say
    until_s: float


class _Order(NamedTuple):
    """A change that was decided and is not seen yet."""

    worker_id: str
    role: Role
    at_s: float


class Autopilot:
    """Owns the memory of its own changes, of persons' changes and of the latest loads. Knows no clock and no network.

    One change at a time: the next one waits until the last is seen, or given up. A change of a worker's role that it
    did not decide is a person's, and that worker is left alone for `person_s`.
    """

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self._epochs: dict[str, int] = {}
        self._pinned: dict[str, float] = {}  # until when
        self._order: _Order | None = None
        self._starting: tuple[int, float] | None = None  # workers before one more was ordered, when to give it up
        self._budget = TokenBucket(rules.changes_per_hour, 0.0, _HOUR_S)  # of one worker
        self._cost = 0.0  # of the last change
        self._last: tuple[Role, Role, float] | None = None  # change: before, after, when
        self._last_but_one: tuple[Role, Role, float] | None = None
        self._loads: deque[tuple[float, int]] = deque()
        self._short_since_s: float | None = None
        self._idle_since_s: float | None = None

    def decide(self, seen: Observation, now_s: float, advice: Advice | None = None) -> Decision:
        """The decision for this moment. A decision with `changes` counts as carried out unless `undo` is called."""
        self._note(seen, now_s)
        self._last_but_one = self._last
        rules, split = self.rules, seen.split
        capacity = Capacity(seen.speed, seen.ttft_s, seen.tpot_s, rules.attainment)
        demand = demand_of(seen, self._sequences(now_s), rules.clear_s)
        if advice is not None and now_s < advice.until_s:
            demand = _greater(demand, advice.demand)
        pressure = _corrected(capacity.pressure(split, demand), seen, rules)
        hold = Decision("hold", "no phase needs more workers", split, split, demand, pressure, pressure)
        if not split.serves or self._order is not None:
            return replace(hold, reason="a change is under way" if split.serves else "nobody can serve")
        if pressure.most < (1.0 if _meets(seen.traffic, rules.attainment) else rules.pressed):
            self._short_since_s = None
            return self._fewer(hold, seen, capacity, now_s)
        self._idle_since_s = None
        target = capacity.best(split, demand, rules.roles)
        if advice is not None and now_s < advice.until_s and advice.target is not None:
            target = advice.target if advice.target.total == split.total else target
        change = self._change(hold, target, seen, capacity, now_s)
        return change if change.changes else self._more(change, capacity, now_s)

    def undo(self) -> None:
        """Takes back the last decision: it was not carried out."""
        self._order, self._last, self._starting = None, self._last_but_one, None
        self._budget.take(-self._cost, 0.0)  # the bucket's time stays that of the decision

    # what was seen

    def _note(self, seen: Observation, now_s: float) -> None:
        workers = {worker.worker_id: worker for worker in seen.workers}
        order = self._order
        for name, worker in workers.items():
            known = self._epochs.get(name)
            if known == worker.epoch:
                continue
            is_own = order is not None and (order.worker_id, order.role) == (name, worker.role)
            is_recent = worker.epoch > 0 and now_s - worker.changed_s < self.rules.person_s
            if not (is_own and known is not None and worker.epoch == known + 1) and (known is not None or is_recent):
                self._pinned[name] = min(worker.changed_s, now_s) + self.rules.person_s
                if math.isinf(worker.changed_s):
                    self._pinned[name] = now_s + self.rules.person_s
            if is_own:
                self._order = None
            self._epochs[name] = worker.epoch
        if self._starting and (len(workers) > self._starting[0] or now_s > self._starting[1]):
            self._starting = None
        if order is not None and (now_s - order.at_s > self.rules.confirm_s or order.worker_id not in workers):
            self._order = None
        if len(self._epochs) > _MOST_KNOWN:
            self._epochs = {name: worker.epoch for name, worker in workers.items()}
        self._pinned = {name: until_s for name, until_s in self._pinned.items() if until_s > now_s}
        self._loads.append((now_s, sum(worker.num_running for worker in seen.workers)))
        while self._loads[0][0] < now_s - _TREND_S:
            self._loads.popleft()

    def _sequences(self, now_s: float) -> float:
        """Sequences that will decode in `lead_s`, by the trend of the last seconds."""
        begin_s, before = self._loads[0]
        number = self._loads[-1][1]
        if now_s - begin_s < _TREND_S / 2:
            return float(number)
        return max(number + (number - before) / (now_s - begin_s) * self.rules.lead_s, 0.0)

    # roles

    def _change(self, hold: Decision, target: Split, seen: Observation, capacity: Capacity, now_s: float) -> Decision:
        """The change that relieves most on the way to the target; `hold` with the reason if there is none."""
        rules, split, now = self.rules, hold.split, hold.pressure
        hold = replace(hold, target=target)
        steps = [
            (_relief(split, changed, seen, capacity, hold.demand, rules), before, after, changed)
            for before, after, changed in split.changes(rules.roles)
            if target.of(before) < split.of(before) and target.of(after) > split.of(after)
        ]
        if not steps:
            return replace(hold, reason="no other ratio of roles is better")
        gain, before, after, changed = max(steps, key=lambda step: step[0])
        predicted = _corrected(capacity.pressure(changed, hold.demand), seen, rules)
        if not gain >= rules.gain * min(now.most, 1.0):
            return replace(hold, reason=f"a change would gain less than {rules.gain:.0%}")
        if self._last is not None and self._last[:2] == (after, before) and now_s < self._last[2] + rules.settle_s:
            whole = _relief(split, target, seen, capacity, hold.demand, rules)  # other traffic needs many changes
            if not whole >= _SETTLED * rules.gain * min(now.most, 1.0):
                return replace(hold, reason="the last change is not taken back yet")
        if self._last is not None and now_s < self._last[2] + rules.between_s:
            return replace(hold, reason="the last change was a moment ago")
        if not self._may_spend(split, now_s):
            return replace(hold, reason=f"{rules.changes_per_hour} changes an hour for each worker are spent")
        worker = self._chosen(seen, before, now_s)
        if worker is None:
            return replace(hold, reason=f"every {before} worker was changed a moment ago, or by a person")
        self._spend(split, now_s)
        self._last = (before, after, now_s)
        self._order = _Order(worker.worker_id, after, now_s)
        return replace(
            hold,
            action="change_role",
            reason=f"{now.phase} needs more workers",
            predicted=predicted,
            worker_id=worker.worker_id,
            role=after,
            epoch=worker.epoch,
        )

    def _chosen(self, seen: Observation, role: Role, now_s: float) -> ObservedWorker | None:
        """The worker of a role that loses least by a change."""
        free = [
            worker
            for worker in seen.workers
            if worker.role == role
            and worker.can_change
            and worker.worker_id not in self._pinned
            and now_s >= worker.changed_s + self.rules.dwell_s
        ]
        return min(free, key=lambda worker: worker.context_tokens + worker.waiting_tokens, default=None)

    def _may_spend(self, split: Split, now_s: float) -> bool:
        return self._budget.level(now_s) >= 1 / split.total

    def _spend(self, split: Split, now_s: float) -> None:
        """Takes one change from what all workers have together."""
        self._cost = 1 / split.total
        self._budget.take(self._cost, now_s)

    # numbers of workers

    def _more(self, hold: Decision, capacity: Capacity, now_s: float) -> Decision:
        """Starts a worker, or says that the targets cannot be met, once no change of roles has helped for a while."""
        rules = self.rules
        best = capacity.pressure(hold.target, hold.demand)
        if min(best.most, hold.pressure.most) <= 1:
            self._short_since_s = None
            return hold
        self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
        if now_s < self._short_since_s + rules.patience_s:
            return hold
        if self._starting:
            return replace(hold, reason="a worker starts")
        needed = _needed(hold.split, hold.demand, capacity, rules.roles)
        if not rules.max_workers or hold.split.total >= rules.max_workers:
            reason = f"{hold.split.total} workers cannot meet the targets"
            return replace(hold, action="cannot_be_met", reason=reason, num_needed=needed)
        if not self._may_spend(hold.split, now_s):
            return hold
        self._short_since_s, self._starting = now_s, (hold.split.total, now_s + rules.start_s)
        self._spend(hold.split, now_s)
        role = min(rules.roles, key=lambda role: capacity.pressure(hold.split.plus(role), hold.demand).most)
        predicted = capacity.pressure(hold.split.plus(role), hold.demand)
        return replace(
            hold, action="add_worker", target=hold.split.plus(role), predicted=predicted, role=role, num_needed=needed,
            reason=f"{hold.pressure.phase} needs more workers, and no other ratio is better",
        )  # fmt: skip

    def _fewer(self, hold: Decision, seen: Observation, capacity: Capacity, now_s: float) -> Decision:
        """Stops a worker that was not needed for a while."""
        rules, split = self.rules, hold.split
        if not rules.max_workers or split.total <= max(rules.min_workers, 1):
            return hold
        fewer = [(role, split.plus(role, -1)) for role in ROLES if split.of(role)]
        able = [(capacity.pressure(less, hold.demand), role, less) for role, less in fewer if less.serves]
        if not able or min(able)[0].most > rules.idle:
            self._idle_since_s = None
            return hold
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        predicted, role, less = min(able, key=lambda one: one[0].most)
        worker = self._chosen(seen, role, now_s)
        if now_s < self._idle_since_s + rules.idle_s or worker is None:
            return replace(hold, reason="fewer workers would do, if that lasts")
        if not self._may_spend(split, now_s):
            return hold
        self._idle_since_s = None
        self._spend(split, now_s)
        self._order = _Order(worker.worker_id, role, now_s)
        return replace(
            hold, action="remove_worker", reason="fewer workers will do", target=less, predicted=predicted,
            worker_id=worker.worker_id, role=role, epoch=worker.epoch,
        )  # fmt: skip


def _greater(measured: Demand, expected: Demand) -> Demand:
    """The greater demand of each phase."""
    work = max(measured, expected, key=lambda demand: demand.work_per_s)
    tokens = max(measured, expected, key=lambda demand: demand.tokens_per_s)
    return Demand(work.work_per_s, work.prompt_s, tokens.tokens_per_s, tokens.context_tokens)


def _corrected(pressure: Pressure, seen: Observation, rules: ScalingRules) -> Pressure:
    """Raised by what the measured attainment lacks: the models may promise too much."""
    traffic = seen.traffic
    if not traffic.num_ended:
        return pressure
    ttft, tpot = traffic.num_in_ttft / traffic.num_ended, traffic.num_in_tpot / traffic.num_ended
    return Pressure(
        pressure.prefill * (1 + max(rules.attainment - ttft, 0.0) / 2),
        pressure.decode * (1 + max(rules.attainment - tpot, 0.0) / 2),
    )


def _meets(traffic: Traffic, attainment: float) -> bool:
    """Whether as many of the requests that ended as shall met both targets: what serves them may stay."""
    return traffic.num_ended > 0 and min(traffic.num_in_ttft, traffic.num_in_tpot) >= attainment * traffic.num_ended


def _relief(
    split: Split, changed: Split, seen: Observation, capacity: Capacity, demand: Demand, rules: ScalingRules
) -> float:
    before = _corrected(capacity.pressure(split, demand), seen, rules)
    after = _corrected(capacity.pressure(changed, demand), seen, rules)
    return math.inf if math.isinf(before.most) and not math.isinf(after.most) else before.most - after.most


def _needed(split: Split, demand: Demand, capacity: Capacity, roles: tuple[Role, ...]) -> int:
    """How many workers would meet the targets, in the best split; 0 if no number would."""
    for _ in range(16 * max(split.total, 1)):
        pressure = capacity.pressure(split, demand)
        if pressure.most <= 1:
            return split.total
        if math.isinf(pressure.most):
            return 0
        split = min((split.plus(role) for role in roles), key=lambda more: capacity.pressure(more, demand).most)
    return 0
