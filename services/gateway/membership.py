"""Who is in the cluster: a pure core with the time as an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv import layout
from halfmoon.pb.gateway_pb2 import BlockEvents as PbBlockEvents
from halfmoon.pb.gateway_pb2 import StepTiming, WorkerIdentity, WorkerLoad
from halfmoon.pb.types_pb2 import BOTH, DECODE, PREFILL
from halfmoon.pb.types_pb2 import Role as PbRole
from halfmoon.policy.block_index import BlockEvents, BlockIndex, unpack_keys
from halfmoon.policy.cluster_view import ClusterView, LinkView, Role, WorkerView
from halfmoon.policy.kinship import Kinship
from halfmoon.policy.latency import NUM_COEFFICIENTS, PrefillModel, PrefillSample, StepModel, StepSample, prefill_sample
from halfmoon.policy.refinement import WorkerLatency
from halfmoon.rpc.layout_message import layout_from

MISSED_HEARTBEATS = 3
_MAY_RETURN_S = 5.0  # a worker that lost its connection, or was started again, is back within these

_ROLES: dict[PbRole.ValueType, Role] = {PREFILL: "prefill", DECODE: "decode", BOTH: "both"}


@dataclass(slots=True, eq=False)
class Member:
    """One worker's standing. Owned by `Membership`, which alone changes it."""

    identity: WorkerIdentity
    joined_s: float
    heard_s: float
    load: WorkerLoad
    latency: WorkerLatency
    holder: int  # its number in the block index
    store_holder: int = -1  # that of the store that it uses; -1: it uses none
    listening: bool = False
    prefilling: dict[str, int] = field(default_factory=dict)  # sent since the last report: prompt tokens by request
    decoding: set[str] = field(default_factory=set)  # placed since the last report
    computed_tokens: int = 0  # since the last report, of prompts that were there then

    @property
    def worker_id(self) -> str:
        """Its name, unique in the cluster."""
        return self.identity.worker_id

    @property
    def role(self) -> Role:
        """Its role as the policies name it."""
        return _ROLES[self.identity.role]

    @property
    def kind(self) -> str:
        """Workers of one kind are about equally fast."""
        return f"{self.role} {self.identity.device}"

    def view(self, prefill: PrefillModel, step: StepModel) -> WorkerView:
        """What the policies see of it, with the models to be believed of it."""
        identity, load = self.identity, self.load
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
            waiting_prefill_tokens=load.waiting_prefill_tokens + sum(self.prefilling.values()),
            draining=load.draining,
            listening=self.listening,
            links=tuple(
                LinkView(link.address, link.bandwidth_bytes_per_s, link.latency_s)
                for link in load.links
                if link.bandwidth_bytes_per_s > 0
            ),
            context_in_use_tokens=load.context_tokens,
            prefill_free_s=self.heard_s + prefill.b * max(load.waiting_prefill_tokens - self.computed_tokens, 0),
            step_tokens=identity.step_tokens,
            prefill_model=prefill,
            step_model=step,
            holder=self.holder,
            fetch_s_per_token=self._restore_s_per_token,
            store_holder=self.store_holder,
        )

    @property
    def _restore_s_per_token(self) -> float:
        """From its store, as it said last; infinite where it said nothing."""
        store = self.identity.kv_store
        speeds = [one.bandwidth_bytes_per_s for one in self.load.links if store and one.address == store]
        return layout_from(self.identity.layout).token_bytes / speeds[0] if speeds and speeds[0] > 0 else math.inf


class Membership:
    """Owns the members, when each was last heard, their view, and where blocks are.

    Knows nothing of connections and has no clock.
    """

    def __init__(self, model_fingerprint: str, heartbeat_interval_s: float) -> None:
        self.model_fingerprint = model_fingerprint
        self.heartbeat_interval_s = heartbeat_interval_s
        self._members: dict[str, Member] = {}
        self._view = ClusterView()
        self.index = BlockIndex()
        self._prefill_models = Kinship[PrefillModel]()
        self._step_models = Kinship[StepModel]()
        self._last_left_s: float | None = None
        self._last_capacity_tokens: int | None = None  # when the last member left

    def members(self) -> list[Member]:
        """Every member, in the order of joining."""
        return list(self._members.values())

    @property
    def kv_layout(self) -> layout.KVLayout | None:
        """The KV layout of the first member, by which blocks are named; None while nobody is there."""
        first = next(iter(self._members.values()), None)
        return None if first is None else layout_from(first.identity.layout)

    def join(self, identity: WorkerIdentity, now_s: float) -> Member:
        """Adds a worker; one of the same id is replaced.

        Raises InvalidRequest for an unusable identity and Incompatible for another model, or a KV layout that
        differs from the members' in more than its dtype.
        """
        self._check(identity)
        load = WorkerLoad(free_blocks=identity.total_blocks)
        before = self._members.pop(identity.worker_id, None)
        holder = self.index.number(identity.worker_id)
        latency = WorkerLatency(PrefillModel(*identity.profile.prefill), StepModel(*identity.profile.step))
        store_holder = self.index.number(_store_name(identity.kv_store)) if identity.kv_store else -1
        member = Member(identity, now_s, now_s, load, latency, holder, store_holder)
        self._members[identity.worker_id] = member
        if before is not None:
            self._forget_store(before.identity.kv_store)
        self._view.remove(identity.worker_id)  # so that the order is that of joining
        self._show(now_s, member)
        return member

    def report(self, member: Member, load: WorkerLoad, now_s: float) -> None:
        """Takes a load report, which is also a heartbeat. What was sent before it is in its figures."""
        member.heard_s = now_s
        member.load = load
        member.prefilling.clear()
        member.computed_tokens = 0
        member.decoding.clear()
        self._learn(member, load.steps, now_s)
        self._show(now_s, member)

    def set_listening(self, member: Member, listening: bool) -> None:
        """Notes whether tokens of this worker reach the gateway: only then it can be placed on."""
        member.listening = listening
        self._show(member.heard_s, member)

    def note_blocks(self, member: Member, events: PbBlockEvents) -> bool:
        """Takes what changed in a worker's prefix cache. False when messages are missing: it must begin anew."""
        if self._members.get(member.worker_id) is not member:
            return True
        stored, evicted = unpack_keys(events.stored), unpack_keys(events.evicted)
        return self.index.apply(member.holder, BlockEvents(events.sequence, stored, evicted, events.is_snapshot))

    @property
    def stores(self) -> set[str]:
        """The addresses of the stores that members use."""
        return {member.identity.kv_store for member in self._members.values() if member.identity.kv_store}

    def note_stored(self, address: str, events: BlockEvents) -> bool:
        """Takes what changed in the store there; of one that nobody uses nothing. False: it must begin anew."""
        return address not in self.stores or self.index.apply(self.index.number(_store_name(address)), events)

    def num_stored(self, address: str) -> int:
        """Blocks that the store there has, as far as it is known."""
        return self.index.num_blocks(self.index.number(_store_name(address))) if address in self.stores else 0

    def note_placed(
        self, request_id: str, prefill: Member, decode: Member, num_prompt_tokens: int, now_s: float
    ) -> None:
        """Counts a request against both its workers, its decoding and its tokens until their next report."""
        prefill.prefilling[request_id] = num_prompt_tokens
        decode.decoding.add(request_id)
        self._show(now_s, prefill, decode)

    def note_prefilled(
        self, request_id: str, prefill: Member, sample: PrefillSample, now_s: float, *, was_restored: bool = False
    ) -> None:
        """The prompt is computed. `sample` teaches only where the worker does not report its steps: others may have
        been computed in the same ones. Of a prompt that was restored it holds what loading took, and teaches nothing.
        """
        if prefill.prefilling.pop(request_id, None) is None:
            prefill.computed_tokens += round(sample.new_tokens)
        if not prefill.identity.step_tokens and not was_restored:
            self._learn_prefills(prefill, [sample], now_s)
        self._show(now_s, prefill)

    def note_ended(self, request_id: str, prefill: Member, decode: Member, now_s: float) -> None:
        """The request is on none of its workers any more."""
        prefill.prefilling.pop(request_id, None)
        decode.decoding.discard(request_id)
        self._show(now_s, prefill, decode)

    def leave(self, member: Member, now_s: float) -> bool:
        """Removes `member`; False if it is gone or replaced already."""
        if self._members.get(member.worker_id) is not member:
            return False
        self._last_left_s = now_s
        self._last_capacity_tokens = self._capacity_tokens()
        del self._members[member.worker_id]
        self._view.remove(member.worker_id)
        self.index.forget(member.worker_id)
        self._forget_store(member.identity.kv_store)
        self._prefill_models.forget(member.worker_id)
        self._step_models.forget(member.worker_id)
        return True

    def overdue(self, now_s: float) -> list[Member]:
        """Members that missed three heartbeats."""
        limit_s = MISSED_HEARTBEATS * self.heartbeat_interval_s
        return [member for member in self._members.values() if now_s - member.heard_s > limit_s]

    def excuse(self, now_s: float) -> None:
        """Counts every member as heard of now: it was this gateway that did not listen."""
        for member in self._members.values():
            member.heard_s = now_s

    def view(self) -> ClusterView:
        """The cluster for the policies; it goes on changing."""
        return self._view

    def expects_worker(self, now_s: float) -> bool:
        """Whether there may soon be a worker that is not ready now: one is a member, or was one a moment ago."""
        if self._last_left_s is not None and now_s - self._last_left_s <= _MAY_RETURN_S:
            return True
        return any(not worker.is_ready for worker in self._view.workers)

    def context_tokens(self, model_context_tokens: int) -> int:
        """Longest prompt + output that model and every member can hold; while nobody is there, as it was before."""
        capacity_tokens = self._capacity_tokens() if self._members else self._last_capacity_tokens
        return model_context_tokens if capacity_tokens is None else min(model_context_tokens, capacity_tokens)

    def _learn(self, member: Member, steps: Sequence[StepTiming], now_s: float) -> None:
        """Of a step that does both, prefill is what the decodes do not explain."""
        decodes = [StepSample(one.batch, one.context_tokens, one.seconds) for one in steps if not one.prefill_tokens]
        if decodes:
            member.latency.observe_steps(decodes)
            self._step_models.note(member.worker_id, member.kind, member.latency.step, len(decodes), now_s)
        model = member.latency.step
        prefills = [
            prefill_sample(one.prefill_tokens, one.prefill_pairs, one.seconds - _decoding_s(one, model))
            for one in steps
            if one.prefill_tokens
        ]
        if prefills:
            self._learn_prefills(member, prefills, now_s)

    def _learn_prefills(self, member: Member, samples: Sequence[PrefillSample], now_s: float) -> None:
        member.latency.observe_prefills(samples)
        self._prefill_models.note(member.worker_id, member.kind, member.latency.prefill, len(samples), now_s)

    def _forget_store(self, address: str) -> None:
        """One that used it is gone."""
        if address and address not in self.stores:
            self.index.forget(_store_name(address))

    def _show(self, now_s: float, *members: Member) -> None:
        """Puts what is new of them into the view; what comes from one that left already is too late."""
        for member in members:
            if self._members.get(member.worker_id) is member:
                step = self._step_models.believed(member.worker_id, member.kind, member.latency.step, now_s)
                self._view.put(member.view(self._prefill_model(member, now_s), step))

    def _prefill_model(self, member: Member, now_s: float) -> PrefillModel:
        return self._prefill_models.believed(member.worker_id, member.kind, member.latency.prefill, now_s)

    def _capacity_tokens(self) -> int:
        return self._view.least_capacity_tokens

    def _check(self, identity: WorkerIdentity) -> None:
        if identity.role not in _ROLES:
            raise InvalidRequest("a worker must say its role", param="role")
        for name in ("worker_id", "address", "context_tokens", "total_blocks"):
            if not getattr(identity, name):
                raise InvalidRequest(f"a worker must say its {name}", param=name)
        if identity.model_fingerprint != self.model_fingerprint:
            raise Incompatible(
                f"worker {identity.worker_id} serves model {identity.model_fingerprint}, "
                f"this gateway serves {self.model_fingerprint}"
            )
        for member in self._members.values():
            differing = _differing(identity, member.identity)
            if member.worker_id != identity.worker_id and differing:
                raise Incompatible(
                    f"worker {identity.worker_id} has {_named(differing, identity)}, "
                    f"worker {member.worker_id} has {_named(differing, member.identity)}: "
                    "workers that exchange KV must agree in it"
                )
        layout_from(identity.layout)
        for coefficients in (identity.profile.prefill, identity.profile.step):
            if len(coefficients) not in (0, NUM_COEFFICIENTS) or not all(0 <= one < math.inf for one in coefficients):
                raise InvalidRequest("a latency profile has three coefficients, none below 0", param="profile")


def _store_name(address: str) -> str:
    """Of a store as a holder in the index; no worker has such a name."""
    return f"store\0{address}"


def _decoding_s(step: StepTiming, model: StepModel) -> float:
    return model.seconds(step.batch, step.context_tokens) if step.batch else 0.0


def _differing(one: WorkerIdentity, other: WorkerIdentity) -> list[str]:
    """In what two workers must agree to exchange KV, and do not; a receiver converts another dtype."""
    mine, others = _exchanged(one), _exchanged(other)
    return [name for name in mine if mine[name] != others[name]]


def _exchanged(identity: WorkerIdentity) -> dict[str, int]:
    names = ("num_layers", "num_kv_heads", "head_dim", "block_tokens")
    return {name: getattr(identity.layout, name) for name in names} | {"kv_frame_version": identity.kv_frame_version}


def _named(names: Sequence[str], identity: WorkerIdentity) -> str:
    exchanged = _exchanged(identity)
    return ", ".join(f"{name} {exchanged[name]}" for name in names)
