"""One simulated store: the catalogue of real stores, in whose tiers each block takes one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Change, Tier
from halfmoon.catalog.replica_marks import ReplicaMarks
from halfmoon.policy.eviction import policy_named
from halfmoon.policy.placement.store_choice import runs
from halfmoon.sim.cluster.cluster_spec import Stores

_SWEEP_S = 1.0  # between checks for copies that cooled down


class StoreChanges(NamedTuple):
    """Blocks that a store did not have, and that it has no more."""

    stored: tuple[int, ...]
    evicted: tuple[int, ...]


class SimStore:
    """Owns which blocks are in which tier. Knows no links, and of time only what it is told."""

    def __init__(self, number: int, node: int, spec: Stores, block_tokens: int) -> None:
        """number: among the stores; node: whose network port it has; block_tokens: of the workload's prefixes."""
        self.number = number
        self.node = node
        self.name = f"store-{number}"
        self._spec = spec
        self._places = {tier: tokens // block_tokens for tier, tokens in spec.tier_tokens.items()}
        self._catalog = Catalog({tier: policy_named(spec.policy) for tier in self._places}, self._note)
        self._replicas = ReplicaMarks()
        self._to_copy: dict[Tier, dict[bytes, None]] = {tier: {} for tier in self._places if tier is not Tier.DRAM}
        self._stored: dict[int, None] = {}  # since `take_changes` was called last
        self._evicted: dict[int, None] = {}
        self._swept_s = 0.0

    def __contains__(self, block: int) -> bool:
        return _name(block) in self._catalog

    def find(self, blocks: Sequence[int], now_s: float) -> set[int]:
        """Which of these it has. Counts as a use, the last block first."""
        self._sweep(now_s)
        return {blocks[place] for place in self._catalog.find([_name(block) for block in blocks], now_s)}

    def room_idle_s(self, now_s: float) -> float:
        """How long the block was not used that would make room in the slowest tier; inf if there is room."""
        slowest = max(self._places)
        return self._catalog.room_idle_s(slowest, self._places[slowest], now_s)

    def put(
        self,
        prompt: Sequence[int],
        wanted: Collection[int],
        recompute_s: Callable[[int], float],
        now_s: float,
        *,
        is_replica: bool = False,
    ) -> None:
        """Adds those blocks of a prompt that are wanted and not here, as far as there is room beside them.

        recompute_s: cost of computing the block after so many others. A replica stays in memory, and is dropped once
        nobody has used it for a while.
        """
        self._sweep(now_s)
        names = [_name(block) for block in prompt]
        new = {depth for depth, block in enumerate(prompt) if block in wanted and names[depth] not in self._catalog}
        expires_at_s = math.inf if self._spec.ttl_s is None else now_s + self._spec.ttl_s
        for run in runs(len(prompt), new):
            held = [names[run.start - 1]] if run.start and names[run.start - 1] in self._catalog else []
            for block in held:
                self._catalog.hold(block)
            for depth in run:
                if not self._make_room(Tier.DRAM):
                    break
                parent = names[depth - 1] if depth else None
                meta = BlockMeta(names[depth], parent, depth, recompute_s=recompute_s(depth), expires_at_s=expires_at_s)
                self._catalog.add(meta, Tier.DRAM, 1)
                self._catalog.hold(meta.id)
                held.append(meta.id)
                if is_replica:
                    self._replicas.mark(meta.id, 1, now_s)
                else:
                    for waiting in self._to_copy.values():
                        waiting[meta.id] = None
            for block in held:
                self._catalog.release(block)

    def tiers_of(self, blocks: Sequence[int]) -> dict[Tier, int]:
        """How many of these, all of which it has, come from which tier."""
        num: dict[Tier, int] = {}
        for block in blocks:
            entry = self._catalog.get(_name(block))
            assert entry is not None, "the block is not here"
            num[entry.fastest] = num.get(entry.fastest, 0) + 1
        return num

    def read(self, blocks: Sequence[int]) -> None:
        """Uses these, all of which it has; what is in slower tiers alone is copied into memory if there is room."""
        for name in map(_name, blocks):
            self._catalog.touch(name)
            entry = self._catalog.get(name)
            if entry is not None and Tier.DRAM not in entry.tiers:
                self._catalog.hold(name)
                if self._make_room(Tier.DRAM) and self._catalog.can_add(entry.meta.parent, Tier.DRAM):
                    self._catalog.add(entry.meta, Tier.DRAM, 1)
                self._catalog.release(name)

    def next_copies(self, tier: Tier) -> list[bytes]:
        """The next block to copy to a slower tier, after those before it that the tier lacks; empty if none waits."""
        waiting = self._to_copy.get(tier, {})
        while waiting:
            block = next(iter(waiting))
            del waiting[block]
            chain: list[bytes] = []
            entry = self._catalog.get(block)
            while entry is not None and tier not in entry.tiers and min(entry.tiers) < tier:
                chain.append(entry.meta.id)
                entry = self._catalog.get(entry.meta.parent or b"")
            if chain:
                return chain[::-1]
        return []

    def copied(self, tier: Tier, blocks: Sequence[bytes]) -> None:
        """Enters copies into a slower tier, as far as their blocks are still here and there is room."""
        for block in blocks:
            entry = self._catalog.get(block)
            if entry is None or not self._catalog.can_add(entry.meta.parent, tier):
                continue
            held = [one for one in (block, entry.meta.parent) if one is not None and one in self._catalog]
            for one in held:
                self._catalog.hold(one)
            if self._make_room(tier):
                self._catalog.add(entry.meta, tier, 1)
            for one in held:
                self._catalog.release(one)

    def take_changes(self) -> StoreChanges:
        """Changes since the last call. A block that was evicted and stored again is in neither."""
        changes = StoreChanges(tuple(self._stored), tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return changes

    def _make_room(self, tier: Tier) -> bool:
        while self._catalog.num_blocks(tier) >= self._places[tier]:
            if self._catalog.pop_victim(tier) is None:
                return False
        return True

    def _sweep(self, now_s: float) -> None:
        self._catalog.expire(now_s)
        if now_s < self._swept_s + _SWEEP_S:
            return
        self._swept_s = now_s
        while len(self._replicas) and (
            cooled := self._replicas.cooled(self._catalog, now_s, self._spec.replica_cool_s)
        ):
            for block in cooled:
                self._catalog.drop(block)

    def _note(self, change: Change) -> None:
        here, there = (self._stored, self._evicted) if change.held else (self._evicted, self._stored)
        block = int.from_bytes(change.block, "big", signed=True)
        if (change.first or change.gone) and there.pop(block, 0) == 0:
            here[block] = None


def _name(block: int) -> bytes:
    return block.to_bytes(8, "big", signed=True)
