"""KV on its way from one simulated worker to another: a hand-over to who decodes, or a prefix that another one has."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.sim.cluster.cluster_spec import Network
from halfmoon.sim.cluster.codec_queues import CodecQueues
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.ports import Ports
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.cluster.worker_steps import WorkerSteps
from halfmoon.sim.event_queue import EventQueue


class KvTransfers:
    """Owns the links, the codecs, and what is on its way. What arrives is there at once for its worker's next step.

    Who sends what to whom is told it; a job that was placed anew meanwhile does not get what it waited for before.
    """

    def __init__(self, network: Network, workers: Sequence[SimWorker], events: EventQueue, steps: WorkerSteps) -> None:
        self._network = network
        self._links = Ports(network, max(worker.node for worker in workers) + 1)
        self._coders = CodecQueues(network, len(workers))
        self._events = events
        self._steps = steps

    @property
    def num_bytes(self) -> float:
        """Sent until now."""
        return self._links.num_bytes

    def wait_s(self, sender: SimWorker, receiver: SimWorker) -> float:
        """Until the link between them is free."""
        return self._links.wait_s(sender.node, receiver.node, self._events.now_s)

    def fetch(self, job: Job, source: SimWorker, target: SimWorker, load_end: int, num_tokens: int) -> None:
        """The last `num_tokens` of the job's first `load_end` come from `source`, while what is before is computed."""
        job.load_end, job.front_end = load_end, load_end - num_tokens
        job.is_loading = True
        num_bytes, now_s = self._kv_bytes(target, num_tokens), self._events.now_s
        end_s = self._links.send(source.node, target.node, num_bytes, now_s, now_s)
        self._events.at(end_s, self._on_fetched, job, target, job.attempt)

    def hand_over(self, job: Job, sender: SimWorker, receiver: SimWorker) -> None:
        """The computed prompt's KV goes to where it decodes, where there is room for it."""
        now_s = self._events.now_s
        ready_s = max(job.begun_s, 0.0) if self._network.handover == "push" else now_s
        num_bytes = self._kv_bytes(sender, job.target)
        end_s = self._links.send(sender.node, receiver.node, num_bytes, ready_s, now_s)
        raw_bytes = num_bytes / self._network.kv_ratio
        coded_s = self._coders.code(sender.number, receiver.number, raw_bytes, ready_s, now_s)
        self._events.at(max(end_s, coded_s), self._on_handed_over, job, sender, receiver, job.attempt)

    def _on_fetched(self, job: Job, target: SimWorker, attempt: int) -> None:
        if job.attempt == attempt:
            job.is_loading = False
            self._steps.wake(target)

    def _on_handed_over(self, job: Job, sender: SimWorker, receiver: SimWorker, attempt: int) -> None:
        if job.attempt != attempt:
            return
        sender.pages.release(job)
        receiver.arrived.append(job)
        job.at = receiver
        job.state = "arrived"
        self._steps.wake(sender)
        self._steps.wake(receiver)

    def _kv_bytes(self, worker: SimWorker, num_tokens: int) -> float:
        return num_tokens * worker.group.latency.kv_bytes_per_token * self._network.kv_ratio
