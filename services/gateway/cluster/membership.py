"""The members of the cluster: a pure core. Time is an argument."""

from __future__ import annotations

import hmac
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import AlreadyHere
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.kv_policy import kv_policy_of, most_seen, most_tokens
from halfmoon.pb.gateway_pb2 import BlockEvents as PbBlockEvents
from halfmoon.pb.gateway_pb2 import WorkerIdentity, WorkerLoad
from halfmoon.pb.prefill_pb2 import KVSource
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.values import SEEN_WHOLE, MostSeen
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex, unpack_keys
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.reported_prompts import ReportedPrompts
from halfmoon.policy.wait_limits import MAY_RETURN_S
from services.gateway.cluster.engine_totals import EngineTotals
from services.gateway.cluster.identity_check import check_identity
from services.gateway.cluster.learned_models import LearnedModels
from services.gateway.cluster.member import Member
from services.gateway.cluster.pooled_stores import PooledStores

_MISSED_HEARTBEATS = 3
_LATE_HEARTBEATS = 1.8  # nearly two are missing


class Membership:
    """Owns the members, when each was last heard from, the view of them, and the block index.

    Knows nothing of connections. Has no clock.
    """

    def __init__(
        self,
        model_fingerprint: str,
        heartbeat_interval_s: float,
        stores: Iterable[str] = (),
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """stores: addresses of stores of the pool beside those that members use; adapters: fingerprints by name."""
        self.model_fingerprint = model_fingerprint
        self._adapters = adapters
        self.heartbeat_interval_s = heartbeat_interval_s
        self._members: dict[str, Member] = {}
        self._view = ClusterView()
        self._changed: dict[str, float] = {}  # members whose rows of the view are out of date, since when
        self.on_stale: Callable[[], None] = lambda: None  # called when the view becomes out of date
        self.index = BlockIndex()
        self.stores = PooledStores(stores, self.index, self._view.fetch_links)
        self.totals = EngineTotals()
        self._models = LearnedModels()
        self._layouts: Counter[KVLayout] = Counter()  # members of each
        self._decoders: dict[str, str] = {}  # of each running request: its decode worker
        self._last_left_s: float | None = None
        self._capacity_tokens: int | None = None  # of every member, or of those that were there last
        self._decode_addresses: frozenset[str] | None = None  # None: members have changed; each of them asks for all
        self._cache_addresses: frozenset[str] | None = None
        self._holders: dict[str, int] = {}  # numbers of workers in the index, by address

    def members(self) -> list[Member]:
        """Every member, in the order of joining."""
        return list(self._members.values())

    @property
    def silent_after_s(self) -> float:
        """A member is shown as silent after this long, before it counts as dead."""
        return _LATE_HEARTBEATS * self.heartbeat_interval_s

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """The members' KV layouts, which differ in dtype at most. A prompt's blocks have other keys in each."""
        return tuple(self._layouts)

    def most_seen(self, tenant_salt: bytes) -> MostSeen:
        """What requests with this salt see."""
        layout = next(iter(self._layouts), None)
        return SEEN_WHOLE if layout is None else MostSeen(*most_seen(kv_policy_of(tenant_salt), layout.block_tokens))

    def layout_of(self, worker_id: str) -> KVLayout | None:
        """The KV layout of a member; None for a worker that is not one."""
        member = self._members.get(worker_id)
        return None if member is None else member.layout

    def join(self, identity: WorkerIdentity, now_s: float, process_key: bytes = b"") -> Member:
        """Adds a worker, in place of one with the same id and the same process's key.

        Raises AlreadyHere if another process has the id, InvalidRequest for an unusable identity, and Incompatible for
        another model, a missing adapter, or a KV layout that differs from the members' in more than its dtype.
        """
        owner = self._members.get(identity.worker_id)
        if owner is not None and not hmac.compare_digest(owner.process_key, process_key):
            raise AlreadyHere("this worker id is taken")
        others = [member.identity for member in self._members.values()]
        check_identity(identity, self.model_fingerprint, self._adapters, others)
        load = WorkerLoad(free_blocks=identity.total_blocks)
        before = self._members.pop(identity.worker_id, None)
        holder = self.index.number(identity.worker_id)
        latency = WorkerLatency(PrefillModel(*identity.profile.prefill), StepModel(*identity.profile.step))
        store_holder = self.stores.holder if identity.kv_store else -1
        member = Member(
            identity, now_s, now_s, load, latency, holder, ReportedPrompts(now_s), process_key, store_holder
        )
        self._members[identity.worker_id] = member
        self._note_capacity()
        self._decode_addresses = self._cache_addresses = None
        self._view.fetch_links.note_holder(holder, serves=identity.can_fetch)
        if before is not None:
            self._forget_address(before)
        self._holders[identity.address] = holder
        self._unite_stores()
        self._layouts[member.layout] += 1
        if before is not None:
            self._forget_layout(before)
        self._view.remove(identity.worker_id)  # so that the order is that of joining
        self._show(now_s, member)
        self.view()  # it has a row from now on
        return member

    def report(self, member: Member, load: WorkerLoad, now_s: float) -> bool:
        """Takes a load report, which is also a heartbeat. Its figures include everything sent to the worker before.

        Returns whether the worker has another role by now.
        """
        member.heard_s, has_changed = now_s, member.take_role(load, now_s)
        if has_changed:
            self._decode_addresses = None
        self.totals.note(member.load, load)
        member.load = load
        member.prompts.report(load.waiting_prefill_tokens, now_s)
        member.decoding.clear()
        row = self._view.row(member.worker_id)
        if row is not None and self._members.get(member.worker_id) is member:
            self._view.links.report(row, [link for link in load.links if not link.is_inbound])
            self._view.fetch_links.report(row, member.fetch_links(self._holder_at, self.stores.holder))
            self._models.report(member.worker_id, member.kind, member.latency, load.steps, self._view, now_s)
        self._show(now_s, member)
        return has_changed

    def set_listening(self, member: Member, listening: bool) -> None:
        """Notes whether the worker's tokens reach the gateway: requests are placed on it only then."""
        member.listening = listening
        self._view.fetch_links.set_serving(member.holder, serves=listening and member.identity.can_fetch)
        self._show(member.heard_s, member)

    def note_blocks(self, member: Member, events: PbBlockEvents) -> bool:
        """Takes changes of a worker's prefix cache. False if messages are missing: the worker must send a snapshot."""
        if self._members.get(member.worker_id) is not member:
            return True
        stored, evicted = unpack_keys(events.stored), unpack_keys(events.evicted)
        return self.index.apply(member.holder, BlockEvents(events.sequence, stored, evicted, events.is_snapshot))

    @property
    def decode_addresses(self) -> frozenset[str]:
        """Addresses that prompts may be handed over to."""
        if self._decode_addresses is None:
            members = self._members.values()
            self._decode_addresses = frozenset(one.identity.address for one in members if one.role != "prefill")
        return self._decode_addresses

    @property
    def cache_addresses(self) -> frozenset[str]:
        """Addresses of the workers whose prefix caches others may read."""
        if self._cache_addresses is None:
            members = self._members.values()
            self._cache_addresses = frozenset(one.identity.address for one in members if one.identity.can_fetch)
        return self._cache_addresses

    def worker_sources(self, holders: Sequence[int], cached_blocks: NDArray[np.int64]) -> list[KVSource]:
        """Those of `holders` that are workers, as a request names them. Stores of the pool need no naming."""
        addresses = {number: address for address, number in self._holders.items() if number in holders}
        return [
            KVSource(address=addresses[number], kind=KVSource.WORKER, num_blocks=int(cached_blocks[number]))
            for number in holders
            if number in addresses
        ]

    def nearest_store(self, worker_id: str) -> str:
        """Address of the store nearest to a member; empty without one."""
        member = self._members.get(worker_id)
        return "" if member is None else member.identity.kv_store

    def note_placed(
        self, request_id: str, prefill: Member, decode: Member, num_prompt_tokens: int, now_s: float
    ) -> None:
        """Counts a request against both its workers until their next reports."""
        prefill.prompts.send(request_id, num_prompt_tokens)
        decode.decoding.add(request_id)
        self._decoders[request_id] = decode.worker_id
        self._view.busy.begin(prefill.worker_id, request_id, now_s)
        self._show(now_s, prefill, decode)

    def note_helping(self, request_id: str, helper: Member, num_tokens: int, now_s: float) -> None:
        """Counts a part of a request's prompt against a worker that computes it, until its next report."""
        helper.prompts.send(request_id, num_tokens)
        self._view.busy.begin(helper.worker_id, request_id, now_s)
        self._show(now_s, helper)

    def note_helped(self, request_id: str, helper: Member, now_s: float) -> None:
        """Notes that the prompt is computed, or that the worker is not needed for it any more. Idempotent."""
        helper.prompts.remove(request_id)
        self._view.busy.end(helper.worker_id, request_id, now_s)
        self._show(now_s, helper)

    def note_prefilled(
        self, request_id: str, prefill: Member, sample: PrefillSample, now_s: float, *, was_restored: bool = False
    ) -> None:
        """Notes that the prompt is computed.

        `sample` is learned from only if the worker does not report its steps, which several prompts may share. The
        sample of a restored prompt includes loading, and is not learned from.
        """
        prefill.prompts.remove(request_id)
        if not prefill.identity.step_tokens and not was_restored:
            self._models.note_prompt(prefill.worker_id, prefill.kind, prefill.latency, sample, now_s)
        self._view.busy.end(prefill.worker_id, request_id, now_s)
        decoder = self._decoders.get(request_id)
        if decoder in self._members:
            self._view.busy.begin(decoder, request_id, now_s)
        self._show(now_s, prefill)

    def note_ended(self, request_id: str, prefill: Member, decode: Member, now_s: float) -> None:
        """Notes that the request has left both its workers."""
        prefill.prompts.remove(request_id)
        decode.decoding.discard(request_id)
        self._decoders.pop(request_id, None)
        for member in (prefill, decode):
            self._view.busy.end(member.worker_id, request_id, now_s)
        self._show(now_s, prefill, decode)

    def leave(self, member: Member, now_s: float) -> bool:
        """Removes `member`; False if it has left or been replaced already."""
        if self._members.get(member.worker_id) is not member:
            return False
        self._last_left_s = now_s
        del self._members[member.worker_id]
        self._note_capacity()
        self._changed.pop(member.worker_id, None)
        self._decode_addresses = self._cache_addresses = None
        self._view.remove(member.worker_id)
        self._forget_address(member)
        self._forget_layout(member)
        self.index.forget(member.worker_id)
        self._unite_stores()
        self._models.forget(member.worker_id)
        return True

    def _forget_address(self, member: Member) -> None:
        """Unless another worker has it by now: one that was started again, before the old one counted as dead."""
        if self._holders.get(member.identity.address) == member.holder:
            del self._holders[member.identity.address]

    def overdue(self, now_s: float) -> list[Member]:
        """Members that missed three heartbeats."""
        limit_s = _MISSED_HEARTBEATS * self.heartbeat_interval_s
        return [member for member in self._members.values() if now_s - member.heard_s > limit_s]

    def excuse(self, stalled_s: float, now_s: float) -> None:
        """Takes `stalled_s` off every member's silence, because it was this gateway that did not listen.

        After a stall of more than an interval, all members count as heard from now: reading the reports that wait in
        the sockets takes a while.
        """
        for member in self._members.values():
            excused_s = math.inf if stalled_s > self.heartbeat_interval_s else stalled_s
            member.heard_s = min(member.heard_s + excused_s, now_s)

    def view(self) -> ClusterView:
        """The cluster as the policies see it: one object, brought up to date by each call."""
        while self._changed:
            worker_id, now_s = self._changed.popitem()
            member = self._members[worker_id]
            models = self._models.models_for(worker_id, member.kind, member.latency, now_s, member.like)
            self._view.put(member.view(models))
        return self._view

    def refresh(self) -> None:
        """Brings the view up to date, and what is derived from it."""
        _ = self.view().capabilities

    def expects_worker(self, now_s: float) -> bool:
        """Whether a worker may soon become ready: a member that is not ready yet, or one that left a moment ago."""
        if self._last_left_s is not None and now_s - self._last_left_s <= MAY_RETURN_S:
            return True
        return any(not worker.is_ready for worker in self.view().workers)

    def context_tokens(self, model_context_tokens: int, tenant_salt: bytes = b"") -> int:
        """Longest prompt + output that the model and every member can hold, beside what a policy in the salt chooses.

        Without members, the last value holds.
        """
        context_tokens = model_context_tokens
        if self._capacity_tokens is not None:
            context_tokens = min(context_tokens, self._capacity_tokens)
        policy = kv_policy_of(tenant_salt)
        if policy is None or not policy.chooses:
            return context_tokens
        sizes = ((member.identity.total_blocks, member.identity.layout.block_tokens) for member in self.members())
        return min([context_tokens, *(most_tokens(policy, num_blocks, size) for num_blocks, size in sizes)])

    def _forget_layout(self, member: Member) -> None:
        self._layouts[member.layout] -= 1
        if not self._layouts[member.layout]:
            del self._layouts[member.layout]

    def _unite_stores(self) -> None:
        members = self._members.values()
        self.stores.unite(member.identity.kv_store for member in members if member.identity.kv_store)

    def _holder_at(self, address: str) -> int:
        """Number of the worker at this address; -1 if it is none."""
        return self._holders.get(address, -1)

    def _show(self, now_s: float, *members: Member) -> None:
        """Has the view updated before it is read again, unless a member has left already."""
        was_stale = bool(self._changed)
        for member in members:
            if self._members.get(member.worker_id) is member:
                self._changed[member.worker_id] = now_s
        if self._changed and not was_stale:
            self.on_stale()

    def _note_capacity(self) -> None:
        if self._members:
            self._capacity_tokens = min(member.capacity_tokens for member in self._members.values())
