"""Several stores as one pool: a trace through the stores' own catalogues and eviction, and the writers' own rule.

Each prompt comes to a worker, which restores what the stores together have of its prefix, computes the rest, and puts
what no store has into the store that `choose_store` names. Workers are spread over the stores evenly; `crowded` has
all of them near the first one; `apart` has stores that know nothing of each other, as without a pool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.kv.index import BLOCK_TOKENS, Hits, Prompt
from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.policy.eviction import PolicyName, policy_named
from halfmoon.policy.placement.store_choice import choose_store, runs

Spread = Literal["even", "crowded", "apart"]


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """One request of a trace."""

    at_s: float
    prompt: Prompt


class Store:
    """Owns one store's catalogue. Each block is one byte of its budget."""

    def __init__(self, policy: PolicyName, max_blocks: int) -> None:
        self.catalog = Catalog({Tier.DRAM: policy_named(policy)})
        self.max_blocks = max_blocks

    def room_idle_s(self, now_s: float) -> float:
        """As the store tells writers."""
        return self.catalog.room_idle_s(Tier.DRAM, self.max_blocks, now_s)

    def put(self, blocks: Sequence[bytes], run: range) -> None:
        """Stores a run of a prompt's blocks, as far as there is room beside it."""
        held = []
        if run.start and blocks[run.start - 1] in self.catalog:
            held.append(blocks[run.start - 1])
            self.catalog.hold(held[0])
        for depth in run:
            if not self._make_room():
                break
            self.catalog.add(BlockMeta(blocks[depth], blocks[depth - 1] if depth else None, depth), Tier.DRAM, 1)
            self.catalog.hold(blocks[depth])
            held.append(blocks[depth])
        for block in held:
            self.catalog.release(block)

    def _make_room(self) -> bool:
        while self.catalog.num_blocks(Tier.DRAM) >= self.max_blocks:
            if self.catalog.pop_victim(Tier.DRAM) is None:
                return False
        return True


@dataclass(slots=True)
class PoolRun:
    """What a trace found in a pool."""

    hits: Hits
    stores: list[Store]
    num_spilled: int = 0  # blocks put into another store than the nearest

    @property
    def num_copies(self) -> int:
        """Blocks held by more than one store, each as often as beyond the first."""
        held = [entry.meta.id for store in self.stores for entry in store.catalog]
        return len(held) - len(set(held))


def read_timed(path: Path) -> list[TimedPrompt]:
    """The requests of a trace in Mooncake's format, in order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        TimedPrompt(row["timestamp"] / 1e3, Prompt(row["input_length"], [_id(number) for number in row["hash_ids"]]))
        for row in rows
    ]


def replay_pool(
    prompts: Iterable[TimedPrompt],
    policy: PolicyName,
    sizes: Sequence[int],
    spread: Spread = "even",
) -> PoolRun:
    """Sends every prompt to a worker near one of the stores."""
    result, chance = PoolRun(Hits(), [Store(policy, size) for size in sizes]), random.Random(0)
    for timed in prompts:
        near = 0 if spread == "crowded" else chance.randrange(len(sizes))
        others = [] if spread == "apart" else [number for number in range(len(sizes)) if number != near]
        _serve(result, timed, near, others)
    return result


def _serve(result: PoolRun, timed: TimedPrompt, near: int, others: Sequence[int]) -> None:
    blocks, stores, now_s = timed.prompt.blocks, result.stores, timed.at_s
    order = [near, *others]
    here = frozenset[int]().union(*(stores[number].catalog.find(blocks, now_s) for number in order))
    missing = set(range(len(blocks))) - here
    result.hits.add(timed.prompt, min(missing, default=len(blocks)))
    chosen = order[choose_store([stores[number].room_idle_s(now_s) for number in order])]
    for run in runs(len(blocks), missing):
        stores[chosen].put(blocks, run)
    result.num_spilled += len(missing) if chosen != near else 0


def show(path: Path, num_stores: int, num_blocks: int) -> None:
    """Prints the share of hits of one store and of several that hold as much together."""
    prompts = read_timed(path)
    print(f"{path.name}: {len(prompts)} prompts, blocks of {BLOCK_TOKENS} tokens, {num_blocks} blocks in all")
    print(f"{'stores':>8}{'workers':>10}{'policy':>13}{'tokens hit':>12}{'blocks hit':>12}{'spilled':>9}{'copies':>8}")
    policies: tuple[PolicyName, ...] = ("lru", "cost-aware")
    spreads: tuple[Spread, ...] = ("even", "crowded", "apart")
    rows = [(1, spreads[0]), *((num_stores, spread) for spread in spreads)]
    for policy in policies:
        for num, spread in rows:
            run = replay_pool(prompts, policy, [num_blocks // num] * num, spread)
            tokens = run.hits.num_hit_tokens / run.hits.num_tokens
            blocks = run.hits.num_hit_blocks / run.hits.num_blocks
            counts = f"{run.num_spilled:>9}{run.num_copies:>8}"
            print(f"{num:>8}{spread:>10}{policy:>13}{tokens:>12.1%}{blocks:>12.1%}{counts}")


def _id(number: int) -> bytes:
    return block_id(number.to_bytes(16, "big"))
