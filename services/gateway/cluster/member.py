"""One worker in the cluster, and what the policies see of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb.gateway_pb2 import LinkSpeed, WorkerIdentity, WorkerLoad
from halfmoon.pb.types_pb2 import BOTH, DECODE, PREFILL
from halfmoon.pb.types_pb2 import Role as PbRole
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.view.fetch_costs import FetchLink
from halfmoon.policy.view.link_speeds import usual_s_per_byte
from halfmoon.policy.view.reported_prompts import ReportedPrompts
from halfmoon.policy.view.worker_view import Role, WorkerView
from halfmoon.rpc.layout_message import layout_from
from services.gateway.cluster.learned_models import WorkerModels

ROLES: dict[PbRole.ValueType, Role] = {PREFILL: "prefill", DECODE: "decode", BOTH: "both"}
PB_ROLES = {role: number for number, role in ROLES.items()}


@dataclass(slots=True, eq=False)
class Member:
    """One worker in the cluster. `Membership` owns it, and alone changes it."""

    identity: WorkerIdentity
    joined_s: float
    heard_s: float
    load: WorkerLoad
    latency: WorkerLatency
    holder: int  # number in the block index
    prompts: ReportedPrompts
    process_key: bytes = field(default=b"", repr=False)
    store_holder: int = -1  # number of the pool of stores there; -1: it uses none
    listening: bool = False
    role_since_s: float = -math.inf  # when its role was changed last
    decoding: set[str] = field(default_factory=set)  # requests placed since the last report
    layout: KVLayout = field(init=False)
    kv_bytes_per_token: int = field(init=False)

    def __post_init__(self) -> None:
        self.layout = layout_from(self.identity.layout)
        self.kv_bytes_per_token = self.layout.token_bytes

    @property
    def worker_id(self) -> str:
        """The worker's id, unique in the cluster."""
        return self.identity.worker_id

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits while the worker is empty."""
        return min(self.identity.context_tokens, self.identity.total_blocks * self.layout.block_tokens)

    @property
    def role(self) -> Role:
        """The role, as the policies name it."""
        return ROLES[self.identity.role]

    @property
    def host(self) -> str:
        """The host's name, or its address if the worker reports no name."""
        return self.identity.host or self.identity.address.rpartition(":")[0]

    @property
    def is_leaving(self) -> bool:
        """Whether answers that it decodes should go on elsewhere."""
        return self.load.draining or self.role == "prefill"

    @property
    def role_epoch(self) -> int:
        """How often its role was changed, as far as is known here."""
        return self.identity.role_epoch

    def take_role(self, load: WorkerLoad, now_s: float) -> bool:
        """Takes the role of a load report. Returns whether it is another one than before."""
        if load.role not in ROLES or load.role_epoch <= self.role_epoch:
            return False
        before, self.identity.role, self.identity.role_epoch = self.identity.role, load.role, load.role_epoch
        self.role_since_s = now_s - load.role_age_s
        return before != load.role

    @property
    def kind(self) -> str:
        """Role and device. Workers of one kind are about equally fast."""
        return f"{self.role} {self.identity.device}"

    @property
    def like(self) -> Sequence[str]:
        """Kinds that compute prompts about as fast; none where its own kind does so from the start."""
        return [f"{role} {self.identity.device}" for role in ("prefill", "both")] if self.role == "decode" else ()

    def view(self, models: WorkerModels) -> WorkerView:
        """What the policies see."""
        identity, load, prefill = self.identity, self.load, models.prefill
        tbt_model, tokens_per_step = models.speculation.per_token(models.step), models.speculation.tokens_per_step
        rule = ChunkRule(prefill, tbt_model.scaled(tokens_per_step))
        return WorkerView(
            worker_id=identity.worker_id,
            role=self.role,
            address=identity.address,
            context_tokens=identity.context_tokens,
            block_tokens=identity.layout.block_tokens,
            total_blocks=identity.total_blocks,
            free_blocks=load.free_blocks,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_reserved=load.num_reserved,
            num_placed=len(self.decoding),
            waiting_prefill_tokens=self.prompts.num_waiting,
            draining=load.draining,
            listening=self.listening,
            context_in_use_tokens=load.context_tokens,
            prefill_free_s=self.prompts.free_s(prefill),
            others_prefill_s=self.prompts.others_s(prefill),
            step_tokens=identity.step_tokens,
            chunk_tokens=identity.chunk_tokens,
            chunk_rule=rule if identity.follows_targets else CONSTANT_CHUNKS,
            layer_passes=identity.layer_passes,
            nests_steps=identity.nests_steps,
            num_layers=identity.layout.num_layers,
            max_running=identity.max_running or math.inf,
            prefill_model=prefill,
            step_model=tbt_model,
            tokens_per_step=tokens_per_step,
            contention=models.contention,
            step_contention=models.step_contention,
            holder=self.holder,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_dtype=identity.layout.dtype,
            fetch_s_per_token=self._fetch_s_per_token,
            store_holder=self.store_holder,
            device=identity.device,
            unit=identity.unit,
            host_name=identity.host,
        )

    def fetch_links(self, holder_of: Callable[[str], int], pool: int) -> list[FetchLink]:
        """Its measured links from holders. `holder_of`: a worker's number by its address; -1 for none.

        What all stores have together comes at the speed of its links to stores in the median.
        """
        links = [self._fetch_link(holder, link) for link in self._inbound if (holder := holder_of(link.address)) >= 0]
        from_stores = [self._fetch_link(pool, link) for link in self._inbound if holder_of(link.address) < 0]
        from_stores.sort(key=lambda link: link.s_per_token)
        return links + from_stores[len(from_stores) // 2 : len(from_stores) // 2 + 1]

    @property
    def _inbound(self) -> list[LinkSpeed]:
        return [link for link in self.load.links if link.is_inbound and link.bandwidth_bytes_per_s > 0]

    def _fetch_link(self, holder: int, link: LinkSpeed) -> FetchLink:
        s_per_token = self.kv_bytes_per_token / link.bandwidth_bytes_per_s
        return FetchLink(holder, s_per_token, link.latency_s + link.waiting_bytes / link.bandwidth_bytes_per_s)

    @property
    def _fetch_s_per_token(self) -> float:
        """Seconds to load a token from a holder whose link it has not measured; inf if it loads nothing."""
        if not self.identity.can_fetch:
            return math.inf
        return self.kv_bytes_per_token * usual_s_per_byte(1.0 / link.bandwidth_bytes_per_s for link in self._inbound)
