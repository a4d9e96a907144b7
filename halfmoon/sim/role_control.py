"""Changes of roles in a simulation, and what a controller sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from halfmoon.policy.scaling.observation import Observation, ObservedWorker, WorkerSpeed
from halfmoon.policy.scaling.traffic_meter import TrafficMeter
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.worker_steps import WorkerSteps
from halfmoon.sim.decode_moves import DecodeMoves
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class RoleController(Protocol):
    """Decides about roles while a simulation runs."""

    every_s: float
    window_s: int  # of the traffic that it sees

    def changes(self, seen: Observation, now_s: float) -> Iterable[tuple[str, Role]]:
        """The workers that are to change now, by name, and their new roles."""


class RoleControl:
    """Owns the epochs of the workers' roles and the traffic's counts. Asks the controller every `every_s`."""

    def __init__(
        self,
        controller: RoleController,
        spec: ClusterSpec,
        workers: Sequence[SimWorker],
        events: EventQueue,
        router: PolicyRouter,
        steps: WorkerSteps,
        moves: DecodeMoves,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called after each change, for requests that wait for a worker."""
        self._controller = controller
        self._spec = spec
        self._workers = {worker.name: worker for worker in workers}
        self._events = events
        self._router = router
        self._steps = steps
        self._on_change = on_change
        self._changed_s: dict[str, list[float]] = {name: [] for name in self._workers}
        self._moves = moves
        self.traffic = TrafficMeter()
        events.at(0.0, self._on_tick)

    def placed(self, job: Job, work_s: float) -> None:
        """Counts a request that came: its first placement."""
        model = self._speed.prefill
        self.traffic.came(work_s or model.seconds(job.prompt), self._events.now_s)

    def ended(self, job: Job) -> None:
        """Counts an end."""
        targets, is_done = self._spec.targets, job.outcome == "completed"
        ttft_s = job.first_s + self._spec.answer_s - job.start_s
        tpot_s = (job.end_s - job.first_s) / max(job.generated - 1, 1)
        self.traffic.ended(
            in_ttft=is_done and (targets.ttft_s is None or ttft_s <= targets.ttft_s),
            in_tpot=is_done and (targets.tpot_s is None or job.generated < 2 or tpot_s <= targets.tpot_s),
            now_s=self._events.now_s,
        )

    def after_step(self, worker: SimWorker) -> None:
        """Lets answers leave a worker that is to prefill, between two of its steps."""
        if worker.group.role == "prefill" and worker.queues.decodes.size:
            self._moves.leave(worker)

    def _on_tick(self) -> None:
        now_s = self._events.now_s
        for name, role in self._controller.changes(self._seen(now_s), now_s):
            worker = self._workers[name]
            worker.group = replace(worker.group, role=role)
            self._changed_s[name].append(now_s)
            self._router.change_role(worker)
            self._steps.wake(worker)
            self._on_change()
        self._events.at(now_s + self._controller.every_s, self._on_tick)

    @property
    def _speed(self) -> WorkerSpeed:
        worker = next(iter(self._workers.values()))
        latency, limits = worker.group.latency, worker.group.limits
        kv_tokens = worker.kv.num_blocks * worker.block_tokens
        return WorkerSpeed(latency.policy_prefill, latency.policy_step, limits.max_running, kv_tokens)

    def _seen(self, now_s: float) -> Observation:
        targets = self._spec.targets
        workers = tuple(
            ObservedWorker(
                worker.name,
                worker.group.role,
                len(changed := self._changed_s[worker.name]),
                changed[-1] if changed else -1e9,
                worker.queues.waiting_tokens(),
                worker.queues.decodes.size + worker.queues.num_reserved,
                worker.progress(now_s)[0],
            )
            for worker in self._workers.values()
            if worker.is_alive
        )
        limits = {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        return Observation(workers, self.traffic.window(self._controller.window_s, now_s), self._speed, **given)
