"""A simulated gateway's knowledge of its workers: their last reports, and what they were sent since."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule
from halfmoon.policy.models.segments import SEGMENT_PASSES
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.reported_prompts import ReportedPrompts
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.routers.colocation import KnownContention
from halfmoon.sim.routers.prefix_keys import prefix_keys
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class Member:
    """The gateway's knowledge of one worker: its last report, and what it was sent since."""

    __slots__ = (
        "context",
        "decoding",
        "evicted",
        "free_blocks",
        "prompts",
        "reported_requests",
        "row",
        "sequence",
        "stored",
        "view",
    )

    def __init__(self, view: WorkerView, row: int, now_s: float) -> None:
        self.view = view  # as it joined
        self.row = row
        self.prompts = ReportedPrompts(now_s)
        self.free_blocks = view.free_blocks
        self.context = 0
        self.reported_requests = 0  # running, waiting and reserved
        self.decoding: set[int] = set()  # placed since the report
        self.stored: dict[int, None] = {}  # prefix blocks that the index does not have yet
        self.evicted: dict[int, None] = {}
        self.sequence = 0  # of its block events


class Members:
    """Owns what is known of each worker beyond its row of the view. Shows loads in the view, blocks in the index."""

    def __init__(self, view: ClusterView, index: BlockIndex) -> None:
        self._view = view
        self._index = index
        self._members: dict[str, Member] = {}
        self._unindexed: dict[str, Member] = {}

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def join(self, view: WorkerView, now_s: float) -> int:
        """Adds a worker to the view; returns its row."""
        self._view.put(view)
        row = self._view.row(view.worker_id)
        assert row is not None
        self._members[view.worker_id] = Member(view, row, now_s)
        return row

    def change_role(self, worker: SimWorker) -> None:
        """Shows a worker's new role."""
        member = self._members[worker.name]
        member.view = replace(member.view, role=worker.group.role)
        self._view.put(member.view)
        self._show(member)

    def leave(self, name: str) -> None:
        """Removes a worker from the view."""
        del self._members[name]
        self._unindexed.pop(name, None)
        self._view.remove(name)

    def report(self, worker: SimWorker, now_s: float) -> None:
        """Takes a load report, with the changes in the worker's prefix cache."""
        member = self._members[worker.name]
        member.prompts.report(worker.queues.waiting_tokens(), now_s)
        member.reported_requests = worker.queues.num_requests
        member.context, blocks = worker.progress(now_s)
        member.free_blocks = blocks // worker.kv.prefix_block_size
        member.decoding.clear()
        self._note_block_changes(worker, member)
        self._show(member)

    def send(self, job: Job, prefill: str, decode: str) -> None:
        """Notes that a request was sent to these workers."""
        sender, receiver = self._members[prefill], self._members[decode]
        sender.prompts.send(job.index, job.target)
        receiver.decoding.add(job.index)
        self._show(sender)
        if receiver is not sender:
            self._show(receiver)

    def help(self, job: Job, name: str) -> None:
        """Notes that a worker was sent a part of a prompt, until `forget`."""
        member = self._members[name]
        member.prompts.send(job.index, job.target)
        self._show(member)

    def prefilled(self, job: Job, name: str) -> None:
        """Notes that a worker has computed a prompt."""
        member = self._members[name]
        member.prompts.remove(job.index)
        self._show(member)

    def moved(self, job: Job, sender: str, receiver: str) -> None:
        """Notes that a running answer goes on elsewhere."""
        self.forget(job, sender)
        self._members[receiver].decoding.add(job.index)
        self._show(self._members[receiver])

    def forget(self, job: Job, name: str) -> None:
        """Takes a request off a worker, if that is still there."""
        member = self._members.get(name)
        if member is not None:
            member.prompts.remove(job.index)
            member.decoding.discard(job.index)
            self._show(member)

    def update_index(self) -> None:
        """Tells the index what workers have reported since the last time; before each lookup."""
        for member in self._unindexed.values():
            stored, evicted = (prefix_keys(np.array(list(ids), np.int64)) for ids in (member.stored, member.evicted))
            member.stored.clear()
            member.evicted.clear()
            member.sequence += 1
            self._index.apply(member.view.holder, BlockEvents(member.sequence, stored, evicted))
        self._unindexed.clear()

    def _note_block_changes(self, worker: SimWorker, member: Member) -> None:
        """Collects changes for the index, which takes them before its next lookup."""
        stored, evicted = worker.kv.take_changes()
        for block_ids, here, there in (
            (stored, member.stored, member.evicted),
            (evicted, member.evicted, member.stored),
        ):
            for block_id in block_ids:
                if there.pop(block_id, 0) == 0:
                    here[block_id] = None
        if member.stored or member.evicted:
            self._unindexed[worker.name] = member

    def _show(self, member: Member) -> None:
        self._view.note_load(
            member.row,
            free_blocks=member.free_blocks,
            num_requests=member.reported_requests + len(member.decoding),
            waiting_prefill_tokens=member.prompts.num_waiting,
            context_in_use_tokens=member.context,
            prefill_free_s=member.prompts.free_s(member.view.prefill_model),
            others_prefill_s=member.prompts.others_s(member.view.prefill_model),
        )


def view_of(
    worker: SimWorker,
    spec: ClusterSpec,
    colocation: KnownContention,
    index: BlockIndex,
    store_holder: int,
    block_tokens: int,
) -> WorkerView:
    """An empty worker as it registers. block_tokens: of the workload's prefixes; store_holder: -1 without stores."""
    group, kv = worker.group, worker.kv
    latency = group.latency
    rule = ChunkRule(latency.policy_prefill, latency.policy_step)
    fetch_s = latency.kv_bytes_per_token * spec.network.fetch_s_per_byte(is_node=False)
    num_prefix_blocks = kv.num_blocks // kv.prefix_block_size
    return WorkerView(
        worker.name,
        group.role,
        colocation.address,
        context_tokens=kv.num_blocks * worker.block_tokens,
        block_tokens=block_tokens,
        total_blocks=num_prefix_blocks,
        free_blocks=num_prefix_blocks,
        step_tokens=min(group.limits.max_batch_tokens, kv.num_blocks * worker.block_tokens),
        chunk_tokens=group.limits.chunk_tokens if group.limits.batching == "chunked" else 0,
        chunk_rule=rule if group.limits.follows_targets else CONSTANT_CHUNKS,
        layer_passes=group.layer_passes,
        nests_steps=group.limits.nests_steps,
        num_layers=SEGMENT_PASSES,  # models have more
        max_running=group.limits.max_running,
        prefill_model=latency.policy_prefill,
        step_model=latency.policy_step,
        kv_bytes_per_token=latency.kv_bytes_per_token * spec.network.codec_within(is_node=False).ratio,
        holder=index.number(worker.name) if kv.is_cache else -1,
        store_holder=store_holder,
        fetch_s_per_token=fetch_s if kv.is_cache else math.inf,
        device=group.device,
        contention=colocation.prefill,
        step_contention=colocation.step,
    )
