"""What is simulated: groups of workers, the network between them, the placement rules, and failures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from halfmoon.catalog.entry import Tier
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_policy import KVPolicy
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.eviction import PolicyName
from halfmoon.policy.placement.conditional import DEFAULT_MODE, ConditionalMode
from halfmoon.policy.placement.device_rules import DeviceRule
from halfmoon.policy.placement.ranking import PREDICTING_MODES, PlacementMode
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.contention import NO_CONTENTION, Contention
from halfmoon.sim.cluster.kv_codecs import KV_CODECS, KvCodec, KvCodecName, auto_codec
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.worker.kept_kv import policy_of
from halfmoon.sim.workloads.workload import Prefixes

TbtOf = Literal["longest", "longest-tenth"]
Batching = Literal["chunked", "prefill-first"]
Handover = Literal["push", "pull"]

MOST_STORES = 4096
BLOCK_TOKENS = 64  # unless a cluster says otherwise
_AT_ONCE = 8  # blocks that a store reads from a slower tier


def _check(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"a cluster's {param} {problem}", param=param)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one step, as in the engine's `SchedulerLimits`.

    - chunked: prompts share steps with decodes, with at most `chunk_tokens` of prompts in such a step, or, with
      `follows_targets`, as many as the TBT targets of the classes leave (`policy.models.chunk_length`).
    - prefill-first: steps that contain only prompts run before steps of decodes.

    `nests_steps`: short prompts run in the middle of a prefill worker's steps (`policy.nested_step`).
    """

    max_batch_tokens: int = 2048
    chunk_tokens: int = 512
    max_running: int = 64
    batching: Batching = "chunked"
    follows_targets: bool = False
    nests_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "chunk_tokens", "max_running"):
            _check(getattr(self, name) >= 1, name, "must be at least 1")


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Equal workers. The workers of a node share its network port, across groups too."""

    role: Role
    count: int
    latency: LatencyModel
    limits: BatchLimits = BatchLimits()
    prefix_cache: bool = True
    kv_tokens: int | None = None  # None: what the latency model's memory holds
    workers_per_node: int | None = None  # None: one node for each worker
    first_node: int | None = (
        None  # groups that name the same number share nodes; None: the nodes after those of earlier groups
    )
    price_per_hour: float = 0.0  # of one worker
    layer_passes: int = 0  # parts in which layers of a fetched prefix arrive while its step computes; 0: by block
    device: str = ""  # for `ClusterSpec.devices`

    def __post_init__(self) -> None:
        _check(self.count >= 0, "count", "must not be negative")
        _check(self.workers_per_node is None or self.workers_per_node >= 1, "workers_per_node", "must be at least 1")


@dataclass(frozen=True, slots=True)
class Network:
    """The network between workers. A port carries one transfer after another, each at full speed.

    - push: the decode worker reserves room before the prefill, and KV is sent while it is computed. A decode worker
      without room refuses; the router then places the request again, at most three times.
    - pull: KV waits at the prefill worker until the decode worker has room.
    """

    bytes_per_s: float = 25e9  # of a node's port, each way
    latency_s: float = 1e-4
    node_bytes_per_s: float = 300e9  # between workers of one node
    handover: Handover = "push"
    codec: KvCodecName | Literal["auto"] | KvCodec = "raw"  # of hand-overs; what is written to stores is raw

    def __post_init__(self) -> None:
        _check(self.bytes_per_s >= 1 and self.node_bytes_per_s >= 1, "bytes_per_s", "must be above 0: at least 1")
        _check(0 <= self.latency_s < math.inf, "latency_s", "must not be negative, and finite")
        codec = self.codec_within(is_node=False)
        _check(0 < codec.ratio <= 1, "codec", "must send some bytes, and not more than there are")
        speeds = codec.encode_bytes_per_s, codec.decode_bytes_per_s
        _check(
            all(speed is None or speed >= 1 for speed in speeds), "codec", "must be faster than 0: at least 1 byte/s"
        )

    def codec_within(self, *, is_node: bool) -> KvCodec:
        """The codec of hand-overs within a node, or between nodes."""
        if isinstance(self.codec, KvCodec):
            return self.codec
        if self.codec == "auto":
            return auto_codec(self.node_bytes_per_s if is_node else self.bytes_per_s)
        return KV_CODECS[self.codec]

    def fetch_codec_within(self, *, is_node: bool) -> KvCodec:
        """The codec of what a worker fetches within a node, or between nodes: the exact one that workers choose."""
        return auto_codec(self.node_bytes_per_s if is_node else self.bytes_per_s)

    def fetch_s_per_byte(self, *, is_node: bool) -> float:
        """Seconds that a byte of KV takes to be fetched: encoding, the network and decoding overlap."""
        ratio, encode_s, decode_s = self.fetch_codec_within(is_node=is_node).cost
        return max(ratio / (self.node_bytes_per_s if is_node else self.bytes_per_s), encode_s, decode_s)


@dataclass(frozen=True, slots=True)
class Stores:
    """Equal stores, each with a network port of its own. Workers are near them in turns; what no store has is put.

    A slower tier gets a copy of what comes into memory, behind the requests. Each evicts by itself.
    """

    count: int = 0
    memory_tokens: int = 0  # of KV that each holds
    disk_tokens: int = 0  # 0, here and below: no such tier
    cold_tokens: int = 0
    disk_bytes_per_s: float = 2e9  # of each store, each way
    disk_latency_s: float = 1e-4  # of a block; eight are read at once
    cold_bytes_per_s: float = 2e8
    cold_latency_s: float = 0.03
    policy: PolicyName = "cost-aware"  # of eviction, in every tier
    ttl_s: float | None = None  # after storing it a block is dropped; None: never
    replica_mbps: float = 100.0  # most megabytes a second of hot prefixes that stores copy from each other, or workers
    replica_cool_s: float = 300.0  # a copy is dropped after this long without use

    def __post_init__(self) -> None:
        sizes = self.count, self.memory_tokens, self.disk_tokens, self.cold_tokens
        _check(min(sizes) >= 0, "stores", "must not be negative")
        _check(self.count <= MOST_STORES, "stores", f"must be at most {MOST_STORES:,}")
        _check(not self.count or self.memory_tokens > 0, "stores", "must have memory: give them memory_tokens")
        for name in ("disk_bytes_per_s", "cold_bytes_per_s", "replica_cool_s"):
            _check(getattr(self, name) > 0, name, "must be above 0")
        for name in ("disk_latency_s", "cold_latency_s", "replica_mbps"):
            _check(getattr(self, name) >= 0, name, "must not be negative")
        _check(self.ttl_s is None or self.ttl_s > 0, "ttl_s", "must be above 0")

    @property
    def tier_tokens(self) -> dict[Tier, int]:
        """Room of each tier that there is."""
        tokens = {Tier.DRAM: self.memory_tokens, Tier.DISK: self.disk_tokens, Tier.COLD: self.cold_tokens}
        return {tier: num for tier, num in tokens.items() if num}

    def read_s(self, tier: Tier, num_blocks: int, num_bytes: float) -> float:
        """Seconds to read or write blocks in a tier."""
        if tier is Tier.DRAM:
            return 0.0
        is_disk = tier is Tier.DISK
        latency_s, bytes_per_s = (
            (self.disk_latency_s, self.disk_bytes_per_s) if is_disk else (self.cold_latency_s, self.cold_bytes_per_s)
        )
        return -(-num_blocks // _AT_ONCE) * latency_s + num_bytes / bytes_per_s


NO_STORES = Stores()


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker dies at `at_s` and returns at `back_s` with empty memory; None: it never returns."""

    worker: int  # its number, counted through the groups
    at_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        _check(
            0 <= self.at_s < math.inf, "at_s", "must not be negative, and finite: the first request comes at second 0"
        )
        _check(self.back_s is None or self.at_s < self.back_s < math.inf, "back_s", "must be after at_s, and finite")


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The targets of every request; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None  # of a request's longest gap, or the mean of its longest tenth; policies do not see it
    tbt_of: TbtOf = "longest"

    def __post_init__(self) -> None:
        for name, target_s in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("tbt", self.tbt_s)):
            if target_s is not None and not 0 < target_s < math.inf:
                raise InvalidRequest(
                    f"the target for {name.upper()} must be a time above 0 seconds, got {target_s:g}", param=name
                )


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """One cluster under one gateway."""

    groups: tuple[WorkerGroup, ...]
    network: Network = Network()
    placement: PlacementMode = "kvcache-centric"
    balancing_threshold: float = 2.0
    admission: AdmissionMode = "off"
    targets: SloTargets = SloTargets()  # used by admission and by the result
    block_tokens: int = BLOCK_TOKENS
    report_s: float = 1.0  # between two load reports of a worker
    failures: tuple[Failure, ...] = ()
    contention: Contention = NO_CONTENTION  # between the workers of a node
    request_s: float = 0.0  # from the client to the worker: HTTP, placement, calls
    answer_s: float = 0.0  # from the worker to the client, for each token
    conditional: ConditionalMode = DEFAULT_MODE  # whether decode workers compute prompts

    stores: Stores = NO_STORES
    devices: tuple[DeviceRule, ...] = ()  # which prompts workers of a device compute
    hot_spots: bool = False  # running answers leave busy decode workers where that pays
    max_prefill_degree: int = 1  # most prefill workers that compute one prompt
    classes: tuple[QosClass, ...] = ()  # of the workload's requests; empty: one, with `targets` and `kv_policy`
    kv_policy: str | None = None  # what is kept of the KV of that one class; None: all

    def __post_init__(self) -> None:
        _check(self.block_tokens >= 1, "block_tokens", "must be at least 1")
        policy_of(self.kv_policy)
        _check(self.report_s > 0, "report_s", "must be above 0")
        _check(self.request_s >= 0, "request_s", "must not be negative")
        _check(self.answer_s >= 0, "answer_s", "must not be negative")
        _check(self.max_prefill_degree >= 1, "max_prefill_degree", "must be at least 1")
        may_share = self.max_prefill_degree == 1 or self.placement in PREDICTING_MODES
        _check(may_share, "max_prefill_degree", f"has no effect with placement {self.placement}")
        roles = {group.role for group in self.groups if group.count}
        _check(
            "both" in roles or roles >= {"prefill", "decode"},
            "groups",
            "must have workers that prefill and workers that decode",
        )
        num = self.num_workers
        _check(
            all(0 <= failure.worker < num for failure in self.failures),
            "failures",
            f"must name workers from 0 to {num - 1}",
        )

    @property
    def qos_classes(self) -> tuple[QosClass, ...]:
        """The classes; policies see no limit on the longest gap."""
        targets = self.targets
        one = QosClass("simulated", ttft_s=targets.ttft_s, tbt_s=targets.tpot_s, kv_policy=self.kv_policy)
        return self.classes or (one,)

    @property
    def kv_policies(self) -> list[KVPolicy | None]:
        """What is kept of requests' KV, each once. Blocks that are computed under one are not found under another."""
        return list(dict.fromkeys(policy_of(qos.kv_policy) for qos in self.qos_classes))

    def prefix_block_tokens(self, prefixes: Prefixes | None) -> int:
        """Tokens of the blocks that prefix caches know: those of the workload, or the workers' where policies drop
        some of them.
        """
        return self.block_tokens if prefixes is None or any(self.kv_policies) else prefixes.block_tokens

    @property
    def learns_overheads(self) -> bool:
        """Whether overheads outside queues and steps influence any decision. Live gateways always learn them."""
        return self.request_s > 0 or self.answer_s > 0 or self.admission != "off"

    @property
    def may_keep(self) -> bool:
        """Whether decode workers compute prompts of requests that lost no worker."""
        has_decodes = any(group.role == "decode" and group.count for group in self.groups)
        return has_decodes and self.conditional in ("auto", "strict")

    @property
    def nodes(self) -> list[int]:
        """The node of each worker, in the order of the groups."""
        nodes: list[int] = []
        for group in self.groups:
            first = max(nodes, default=-1) + 1 if group.first_node is None else group.first_node
            nodes += [first + number // (group.workers_per_node or 1) for number in range(group.count)]
        return nodes

    @property
    def num_workers(self) -> int:
        """Workers of all groups."""
        return sum(group.count for group in self.groups)

    @property
    def num_devices(self) -> int:
        """GPUs of all workers."""
        return sum(group.count * group.latency.num_devices for group in self.groups)

    @property
    def price_per_hour(self) -> float:
        """Dollars per hour of all workers."""
        return sum(group.count * group.price_per_hour for group in self.groups)
