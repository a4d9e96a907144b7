"""KV transfers between simulated workers: ports, codec queues, hand-overs to decode, and prefix fetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.sim.cluster.cluster_spec import Network
from halfmoon.sim.cluster.kv_codecs import KvCodec
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.cluster.worker_steps import WorkerSteps
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker

_LAST_FRAME_BYTES = 2 << 20  # sent last in a hand-over that overlaps the prefill


class Ports:
    """Owns the time at which each port is free. Each node has one port per direction, for one transfer at a time. Knows
    nodes by number, and nothing of what is sent.
    """

    def __init__(self, network: Network, num_nodes: int) -> None:
        self._network = network
        self._out_free_s = [0.0] * num_nodes
        self._in_free_s = [0.0] * num_nodes
        self.num_bytes = 0.0

    def send(self, sender: int, receiver: int, num_bytes: float, ready_s: float, now_s: float) -> float:
        """When the last byte arrives, for bytes that are available from `ready_s` on and complete at `now_s`.

        Transfers within a node do not delay each other. If bytes were sent ahead, at least one last frame remains.
        """
        network = self._network
        self.num_bytes += num_bytes
        is_near = sender == receiver
        speed = network.node_bytes_per_s if is_near else network.bytes_per_s
        begin_s = ready_s
        if not is_near:
            begin_s = max(ready_s, self._out_free_s[sender], self._in_free_s[receiver])
        last_s = min(num_bytes, _LAST_FRAME_BYTES) / speed
        end_s = max(begin_s + num_bytes / speed, now_s + last_s)
        if not is_near:
            self._out_free_s[sender] = self._in_free_s[receiver] = end_s
        return end_s + network.latency_s

    def wait_s(self, sender: int, receiver: int, now_s: float) -> float:
        """Seconds until both ports are free."""
        if sender == receiver:
            return 0.0
        return max(self._out_free_s[sender] - now_s, self._in_free_s[receiver] - now_s, 0.0)


class CodecQueues:
    """Owns the time at which each end's codec is free. A codec takes one request at a time. Knows workers and stores by
    number, and nothing of ports.
    """

    def __init__(self, num_ends: int) -> None:
        self._encoder_free_s = [0.0] * num_ends
        self._decoder_free_s = [0.0] * num_ends

    def code(self, codec: KvCodec, sender: int, receiver: int, num_bytes: float, ready_s: float, now_s: float) -> float:
        """When everything is decoded, for KV that can be encoded from `ready_s` on and is complete at `now_s`.

        Both ends work concurrently: encoded bytes are decoded at once.
        """
        _, encode_s, decode_s = codec.cost
        if not encode_s and not decode_s:
            return now_s
        encoded_s = max(self._encoder_free_s[sender], ready_s) + num_bytes * encode_s
        begun_s = max(self._decoder_free_s[receiver], encoded_s - num_bytes * encode_s)
        decoded_s = max(encoded_s, begun_s + num_bytes * decode_s)
        self._encoder_free_s[sender], self._decoder_free_s[receiver] = encoded_s, decoded_s
        return max(decoded_s, now_s)


class _End(NamedTuple):
    """One end of a transfer."""

    node: int  # whose port it uses
    coder: int  # number of its codec queue


class LoadPart(NamedTuple):
    """What one store delivers of a load."""

    store: SimStore
    blocks: list[int]
    wait_s: float  # until its slower tiers have read what others wanted
    read_s: float  # that they take


class KvTransfers:
    """Owns the ports, the codec queues and the KV in transfer. Arrived KV is available to the worker's next step.

    The simulation decides which KV is sent where. A job that was placed again ignores earlier transfers.
    """

    def __init__(
        self,
        network: Network,
        workers: Sequence[SimWorker],
        events: EventQueue,
        steps: WorkerSteps,
        num_stores: int = 0,
    ) -> None:
        self._network = network
        self._ports = Ports(network, max(worker.node for worker in workers) + 1 + num_stores)
        self._codecs = {is_node: network.codec_within(is_node=is_node) for is_node in (False, True)}
        self._fetch_codecs = {is_node: network.fetch_codec_within(is_node=is_node) for is_node in (False, True)}
        self._codec_queues = CodecQueues(len(workers) + num_stores)
        self._num_workers = len(workers)
        self._events = events
        self._steps = steps

    @property
    def num_bytes(self) -> float:
        """Bytes sent so far."""
        return self._ports.num_bytes

    def wait_s(self, sender: SimWorker, receiver: SimWorker) -> float:
        """Seconds until the path between two workers is free."""
        return self._ports.wait_s(sender.node, receiver.node, self._events.now_s)

    def fetch(
        self, job: Job, source: SimWorker, target: SimWorker, load_end: int, num_tokens: int, hidden_s: float = 0.0
    ) -> None:
        """Fetches the last `num_tokens` of the job's first `load_end` tokens from `source`, while the earlier ones are
        computed. The last `hidden_s` of it are hidden by the step behind, which waits for each layer.
        """
        job.load_end, job.front_end = load_end, load_end - num_tokens
        job.is_loading = True
        now_s = self._events.now_s
        end_s = self._fetched_s(_end(source), target, _kv_bytes(target, num_tokens), now_s)
        self._events.at(max(end_s - hidden_s, now_s), self._on_fetched, job, target, job.attempt)

    def load(self, job: Job, parts: Sequence[LoadPart], target: SimWorker, load_end: int, num_tokens: int) -> None:
        """Loads the last `num_tokens` of the job's first `load_end` tokens from several stores at once."""
        job.load_end, job.front_end = load_end, load_end - num_tokens
        job.is_loading = True
        block_bytes = _kv_bytes(target, num_tokens) / max(1, sum(len(part.blocks) for part in parts))
        now_s, ends_s = self._events.now_s, [self._events.now_s]
        for part in parts:
            store = _End(part.store.node, self._num_workers + part.store.number)
            read_s = now_s + part.wait_s + part.read_s
            ends_s.append(self._fetched_s(store, target, len(part.blocks) * block_bytes, read_s))
        self._events.at(max(ends_s), self._on_fetched, job, target, job.attempt)

    def load_s(self, parts: Sequence[LoadPart], target: SimWorker) -> float:
        """Seconds that loading all of it takes: the link's, or the slowest store's."""
        num_tokens = sum(len(part.blocks) for part in parts) * target.kv.prefix_block_size * target.block_tokens
        link_s = _kv_bytes(target, num_tokens) * self._network.fetch_s_per_byte(is_node=False)
        return max((link_s, *(part.read_s for part in parts)))

    def copy(self, source: SimWorker, target: SimWorker, blocks: Sequence[int], num_tokens: int) -> None:
        """Sends a prefix from one worker's cache into another's; `num_tokens` of it are missing there."""
        num_there = source.kv.use(blocks, len(blocks))
        end_s = self._fetched_s(_end(source), target, _kv_bytes(target, num_tokens), self._events.now_s)
        self._events.at(end_s, self._on_copied, target, blocks[:num_there])

    def _on_copied(self, target: SimWorker, blocks: Sequence[int]) -> None:
        if target.is_alive:
            target.kv.adopt(blocks)
            self._steps.wake(target)

    def copied_s(self, sender: SimWorker, receiver: SimWorker, num_tokens: int) -> float:
        """When the KV of that many tokens, sent now, is there."""
        return self._fetched_s(_end(sender), receiver, _kv_bytes(sender, num_tokens), self._events.now_s)

    def wait_from_s(self, parts: Sequence[LoadPart], target: SimWorker) -> float:
        """Seconds until the paths from all of these, and what they read from, are free."""
        now_s = self._events.now_s
        waits = (max(part.wait_s, self._ports.wait_s(part.store.node, target.node, now_s)) for part in parts)
        return max(waits, default=0.0)

    def fetch_s_per_token(self, sender: SimWorker, receiver: SimWorker) -> float:
        """Seconds that a token takes from one worker's cache to another's."""
        return _kv_bytes(receiver, 1) * self._network.fetch_s_per_byte(is_node=sender.node == receiver.node)

    def send_to(self, store: int, sender: int, num_bytes: float) -> float:
        """When bytes sent now from a node arrive at a store's."""
        now_s = self._events.now_s
        return self._ports.send(sender, store, num_bytes, now_s, now_s)

    def hand_over(self, job: Job, sender: SimWorker, receiver: SimWorker) -> None:
        """Sends the KV of a computed prompt that its decode worker lacks, which has reserved room for it."""
        now_s = self._events.now_s
        num_missing = receiver.queues.blocks.num_missing(job)
        if not num_missing:
            self._events.at(now_s + self._network.latency_s, self._on_handed_over, job, sender, receiver, job.attempt)
            return
        ready_s = max(job.begun_s, 0.0) if self._network.handover == "push" else now_s
        codec = self._codecs[sender.node == receiver.node]
        end_s = self._send(codec, _end(sender), _end(receiver), _kv_bytes(sender, num_missing), ready_s, now_s)
        self._events.at(end_s, self._on_handed_over, job, sender, receiver, job.attempt)

    def _fetched_s(self, source: _End, target: SimWorker, raw_bytes: float, whole_s: float) -> float:
        codec = self._fetch_codecs[source.node == target.node]
        return self._send(codec, source, _end(target), raw_bytes, self._events.now_s, whole_s)

    def _send(
        self, codec: KvCodec, sender: _End, receiver: _End, raw_bytes: float, ready_s: float, whole_s: float
    ) -> float:
        """When all KV has arrived and is decoded, if it comes from `ready_s` on and is complete at `whole_s`."""
        end_s = self._ports.send(sender.node, receiver.node, raw_bytes * codec.ratio, ready_s, whole_s)
        return max(end_s, self._codec_queues.code(codec, sender.coder, receiver.coder, raw_bytes, ready_s, whole_s))

    def _on_fetched(self, job: Job, target: SimWorker, attempt: int) -> None:
        if job.attempt == attempt:
            job.is_loading = False
            self._steps.wake(target)

    def _on_handed_over(self, job: Job, sender: SimWorker, receiver: SimWorker, attempt: int) -> None:
        if job.attempt != attempt:
            return
        sender.queues.blocks.release(job)
        receiver.queues.arrived.append(job)
        job.at = receiver.number
        job.state = "arrived"
        self._steps.wake(sender)
        self._steps.wake(receiver)


def _end(worker: SimWorker) -> _End:
    return _End(worker.node, worker.number)


def _kv_bytes(worker: SimWorker, num_tokens: int) -> float:
    return num_tokens * worker.group.latency.kv_bytes_per_token
