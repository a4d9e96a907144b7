"""The simulated gateway: it sees what a live one sees, and the shipped policies decide."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import NoCapacity
from halfmoon.kv.kv_policy import most_seen, num_reusable
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.degradation import LIKELY, Admitted
from halfmoon.policy.admission.qos_classes import ClassTable
from halfmoon.policy.admission.tenants import ANYONE, Tenant
from halfmoon.policy.forecast.restore_plan import (
    LAYERS_OVERHEAD_S,
    LayerLoads,
    RestoreCosts,
    RestorePlan,
    or_by_layer,
    plan_restore,
)
from halfmoon.policy.forecast.ttft import MAX_SOURCES, best_sources
from halfmoon.policy.models.overheads import handover_s
from halfmoon.policy.placement.hot_spots import HotMove, HotSpots
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import NOTHING_CACHED, MostSeen, Placement, PlacementRequest
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.key_table import Keys
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.store_pool import StorePool
from halfmoon.sim.routers.colocation import SimulatedColocation
from halfmoon.sim.routers.members import Members, view_of
from halfmoon.sim.routers.prefix_keys import prefix_keys
from halfmoon.sim.routers.simulated_links import SimulatedLinks
from halfmoon.sim.routers.store_directory import StoreDirectory
from halfmoon.sim.routers.worker_copies import WorkerCopies
from halfmoon.sim.token_times import in_order
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker
from halfmoon.sim.workloads.workload import Ints, Prefixes


class PolicyRouter:
    """Owns the cluster view, the block index and the admission controller. Knows only what workers report, every
    `report_s`.
    """

    wants_reports = True

    def __init__(
        self,
        spec: ClusterSpec,
        workers: list[SimWorker],
        prefixes: Prefixes | None,
        longest_output: int,
        seed: int,
        tenants: Ints | None = None,
        stores: StorePool | None = None,
    ) -> None:
        """`tenants` has the number of each request's tenant."""
        self._spec = spec
        self._workers = workers
        self._by_name = {worker.name: worker for worker in workers}
        self._holders: dict[int, SimWorker] = {}
        self._admitted: set[int] = set()
        self._helpers: dict[int, list[str]] = {}  # of shared prompts that are being computed
        self._prefix_block_tokens = spec.prefix_block_tokens(prefixes)
        self._has_prefixes = prefixes is not None
        self.index = BlockIndex()
        self.view = ClusterView()
        self._colocation = SimulatedColocation(spec.contention, workers, self.view)
        self._members = Members(self.view, self.index)
        self._classes = spec.qos_classes
        rules = PlacementRules(
            spec.placement, spec.balancing_threshold, spec.conditional, spec.devices, spec.max_prefill_degree
        )
        self._admission = AdmissionController(spec.admission, rules, random.Random(seed))
        self._admission.classes = ClassTable(self._classes)
        self._tenants = [] if tenants is None else [Tenant(str(number)) for number in tenants]
        self._admission.shares.is_on = len({tenant.name for tenant in self._tenants}) > 1
        self._longest = longest_output  # what clients send as `max_tokens`
        self.stores = None
        if stores is not None:
            links = self.view.fetch_links
            self.stores = StoreDirectory(spec, stores, self.index, links, self._prefix_block_tokens)
        self.copies = WorkerCopies(spec, self.view, self._prefix_block_tokens)
        for worker in workers:
            self.join(worker, 0.0)

    # membership

    def join(self, worker: SimWorker, now_s: float) -> None:
        """Adds a worker, which is empty."""
        holder = -1 if self.stores is None else self.stores.holder
        view = view_of(
            worker, self._spec, self._colocation.known(worker), self.index, holder, self._prefix_block_tokens
        )
        self._members.join(view, now_s)
        self._report_links(worker)
        if worker.kv.is_cache:
            self._holders[view.holder] = worker
            self.index.apply(view.holder, BlockEvents(0, is_snapshot=True))

    def change_role(self, worker: SimWorker) -> None:
        """Shows a worker's new role; what it was sent stays."""
        self._members.change_role(worker)
        for sender in self._workers:  # links lead to workers that decode
            self._report_links(sender)

    def _report_links(self, worker: SimWorker) -> None:
        row = self.view.row(worker.name)
        if row is not None:
            links = SimulatedLinks(worker, self._spec.network, self._workers, self._colocation)
            self.view.links.report(row, links)

    def leave(self, worker: SimWorker) -> None:
        """Removes a worker."""
        self._members.leave(worker.name)
        self.index.forget(worker.name)

    def report(self, worker: SimWorker, now_s: float) -> None:
        """Takes a load report, with the changes in the worker's prefix cache."""
        self._members.report(worker, now_s)
        row = self.view.row(worker.name)
        if self.stores is not None and row is not None:
            self.stores.report_links(worker, row)

    # requests

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """Places a request. Raises Refused, ContextLengthExceeded or Unavailable, as the live gateway's policies do."""
        name, qos = str(job.index), self._classes[job.qos_class]
        cached_blocks = self._cached_blocks(job)
        if job.index not in self._admitted:
            max_tokens = max(min(self._longest, self._max_output(job.target)), job.output)
            tenant = self._tenants[job.index] if self._tenants else ANYONE
            job.rank_by(self._admission.shares.priority(qos.priority, tenant, 0))
            request = PlacementRequest(
                job.target,
                max_tokens,
                exclude,
                priority=job.priority,
                may_share=job.policy is None,
                most_seen=self._most_seen(job),
                cached_blocks=cached_blocks,
            )
            admitted = self._admission.decide(self.view, request, qos, now_s, tenant)
            self._admitted.add(job.index)
            self._admission.inside.enter(name, self.view, admitted, job.target, now_s, tenant)
            placement = admitted.placement
        else:
            request = PlacementRequest(
                job.target,
                job.num_left,
                exclude,
                priority=job.priority,
                may_share=job.policy is None,
                most_seen=self._most_seen(job),
                cached_blocks=cached_blocks,
                is_failover=job.retries is not None and job.retries.has_lost,
            )
            if job.retries is not None and job.retries.last_reason == "no room":
                may_try = self._admission.note_no_room(name, now_s)
                if not may_try and not job.generated:
                    raise NoCapacity("others of the class have a better right to the room")
            placement = self._admission.place_again(self.view, request, qos, now_s)
            self._admission.inside.move(name, self.view, placement, now_s)
        self._members.send(job, placement.prefill.worker_id, placement.decode.worker_id)
        for helper in placement.helpers:
            self._members.help(job, helper.worker_id)
            self._helpers.setdefault(job.index, []).append(helper.worker_id)
        if self.stores is not None and self._has_prefixes:
            worker = self._by_name[placement.prefill.worker_id]
            self.stores.note_use(job, self._keys_of(job), worker, cached_blocks, placement, now_s)
        elif self._has_prefixes:
            self.copies.note_use(job, self._keys_of(job), request, placement, now_s)
        self._colocation.placed(job, placement, now_s)
        return placement

    def adopt(self, job: Job, now_s: float) -> None:
        """Takes over a request that another router placed at `now_s`."""
        assert job.prefill is not None
        assert job.decode is not None
        prefill, decode = (self._members[self._workers[number].name] for number in (job.prefill, job.decode))
        max_output = max(min(self._longest, self._max_output(job.prompt)), job.output)
        work_s = prefill.view.prefill_model.seconds(job.prompt, most_seen=self._most_seen(job).prompt)
        tbt_s = decode.view.step_model.seconds(max(decode.reported_requests, 1), decode.context)
        qos = self._classes[job.qos_class]
        num_output = self._admission.lengths.predict(qos.name, job.prompt, max_output, LIKELY)
        placement = Placement(prefill.view, decode.view, work_s, tbt_s, work_s=work_s)
        self._admitted.add(job.index)
        admitted = Admitted(placement, qos, max_output, False, num_output, most_seen=self._most_seen(job))
        self._admission.inside.enter(str(job.index), self.view, admitted, job.prompt, now_s)
        self._colocation.placed(job, placement, now_s)

    def learn(self, job: Job) -> None:
        """Learns the answer length of a request that was never here."""
        if job.outcome == "completed":
            self._admission.lengths.add(self._classes[job.qos_class].name, job.prompt, job.generated)

    def source(self, holder: int) -> SimWorker:
        """The worker with this number in the block index, from which a prefix is to be fetched."""
        return self._holders[holder]

    def sources(self, job: Job, placement: Placement) -> list[SimWorker]:
        """The workers from which the prefix of a placement may be fetched whole, best first: few, as gateways name."""
        row = self.view.row(placement.prefill.worker_id)
        num_blocks = (placement.cached_tokens + placement.fetched_tokens) // self._prefix_block_tokens
        blocks = self._cached_blocks(job)
        if row is None or not blocks.any():
            return [self._holders[placement.source]]
        request = PlacementRequest(job.target, 1, cached_blocks=blocks)
        threshold = self._admission.fetching_threshold
        named = best_sources(self.view, row, request, threshold, placement.queue_s, MAX_SOURCES)
        holders = [holder for holder in named if holder in self._holders and blocks[holder] >= num_blocks]
        return [self._holders[holder] for holder in holders or [placement.source]]

    def fetch_plan(self, placement: Placement, num_tokens: int, wait_s: float, fetch_s: float) -> RestorePlan:
        """As `restore_plan`, maybe by layer, for a prompt of `num_tokens`."""
        worker, num_known = placement.prefill, placement.cached_tokens + placement.fetched_tokens
        plan = self.restore_plan(placement, wait_s, fetch_s)
        step_s = worker.prefill_model.seconds(min(num_tokens - num_known, worker.step_tokens), num_known)
        layers = LayerLoads(step_s, worker.layer_passes, LAYERS_OVERHEAD_S)
        costs = RestoreCosts(0.0, fetch_s, load_queue_s=wait_s)
        (most_blocks,) = self.view.fetch_links.most_of_reader(np.array([placement.source]))
        return or_by_layer(plan, costs, self._prefix_block_tokens, layers, int(most_blocks))

    def restore_plan(self, placement: Placement, wait_s: float, fetch_s: float) -> RestorePlan:
        """How the prefix to be fetched is restored, if the link is free after `wait_s`; a token takes `fetch_s`."""
        model = placement.prefill.prefill_model
        alpha = model.b + model.c * placement.cached_tokens
        costs = RestoreCosts(alpha, fetch_s, model.c, wait_s, placement.queue_s)
        return plan_restore(costs, placement.fetched_tokens // self._prefix_block_tokens, self._prefix_block_tokens)

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """Handles the first token of this attempt."""
        self._members.prefilled(job, worker.name)
        self._let_helpers_go(job)
        self._colocation.prefilled(job, worker, now_s)
        self._admission.inside.begin_decode(str(job.index), now_s)

    def move_target(
        self, job: Job, worker: SimWorker, num_tokens: int, num_left: int, now_s: float
    ) -> Placement | None:
        """Where a running answer would go on instead of at `worker`."""
        seen = self._most_seen(job)
        request = PlacementRequest(num_tokens, num_left, (worker.name,), priority=job.priority, most_seen=seen)
        same_kv = np.ones(self.view.num_rows, dtype=np.bool_)
        return self._admission.move_target(self.view, request, same_kv, now_s)

    def hot_moves(self, policy: HotSpots, running: Iterable[tuple[Job, SimWorker]], now_s: float) -> list[HotMove]:
        """The running answers that are to leave busy workers now."""
        answers = []
        for job, worker in running:
            row, length = self.view.row(worker.name), worker.queues.decodes.length(job)
            most_left = max(self._longest - (length - job.prompt), 0)
            if row is not None:
                name, num_generated = str(job.index), length - job.prompt
                answers.append(self._admission.running_answer(name, row, length, num_generated, most_left))
        known = [answer for answer in answers if answer is not None]
        same_kv = np.ones(self.view.num_rows, dtype=np.bool_)
        return policy.choose(self.view, known, lambda row: same_kv, now_s)

    def moved(self, job: Job, sender: SimWorker, receiver: SimWorker, now_s: float) -> None:
        """Notes that a running answer goes on elsewhere."""
        self._members.moved(job, sender.name, receiver.name)
        view = self._members[receiver.name].view
        self._admission.inside.move(str(job.index), self.view, Placement(view, view), now_s)
        self._admission.inside.begin_decode(str(job.index), now_s)

    def forget(self, job: Job, now_s: float) -> None:
        """Removes this attempt from its workers."""
        workers = [self._workers[number] for number in dict.fromkeys((job.prefill, job.decode)) if number is not None]
        self._colocation.left(job, workers, now_s)
        for worker in workers:
            self._members.forget(job, worker.name)
        self._let_helpers_go(job)

    def _let_helpers_go(self, job: Job) -> None:
        for name in self._helpers.pop(job.index, ()):
            self._members.forget(job, name)

    def end(self, job: Job, now_s: float) -> None:
        """Ends a request. Does nothing if it was never admitted."""
        if job.index not in self._admitted:
            return
        self._admitted.remove(job.index)
        ttft_s = tpot_s = None
        if job.outcome == "refused" and job.num_refusals:  # by workers; what they can never hold says nothing of room
            self._admission.note_no_room(str(job.index), now_s)
        if job.outcome == "completed":
            self._note_overheads(job)
            ttft_s = job.first_s + self._spec.answer_s - job.start_s
            tpot_s = (now_s - job.first_s) / (job.output - 1) if job.output > 1 else None
        self._admission.leave(str(job.index), now_s, num_output=job.generated, ttft_s=ttft_s, tbt_s=tpot_s)

    def _note_overheads(self, job: Job) -> None:
        """Learns from a request that needed one attempt. All overheads except the hand-over are the same for all."""
        if self._spec.learns_overheads and not (job.num_refusals or job.num_failovers):
            gaps_s = in_order(job.first_s, job.later_s).tolist() if job.later_s else ()
            overhead_s = self._spec.request_s + self._spec.answer_s
            self._admission.note_overheads(overhead_s, handover_s(gaps_s), str(job.index))

    def _most_seen(self, job: Job) -> MostSeen:
        return MostSeen(*most_seen(job.policy, self._spec.block_tokens))

    def _cached_blocks(self, job: Job) -> NDArray[np.int64]:
        if not job.prefix_blocks:
            return NOTHING_CACHED
        self._members.update_index()
        return self.index.match(self._keys_of(job))

    def _keys_of(self, job: Job) -> Keys:
        if job.keys is None:
            job.keys = prefix_keys(np.array(job.prefix_blocks, dtype=np.int64))
        is_choosing = job.policy is not None and job.policy.chooses
        num_tokens = num_reusable(job.policy, job.prompt, job.target) if is_choosing else job.target
        return job.keys[: num_tokens // self._prefix_block_tokens]

    def _max_output(self, num_prompt: int) -> int:
        """Output tokens that the largest worker's memory leaves for such a prompt."""
        return int(self.view.capabilities.most_capacity_tokens) - num_prompt
