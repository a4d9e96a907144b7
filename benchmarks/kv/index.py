"""Replays a trace through the store's index alone: the share of prompts that it would have held.

    python -m benchmarks.kv.index TRACE.jsonl --blocks 1000 10000 50000

TRACE has Mooncake's format: one object per line, with `input_length` in tokens and `hash_ids`, the prompt's blocks of
512 tokens; equal ids mean equal prefixes. Token hits count a partly filled last block by its tokens, block hits count
it whole. Of a prompt longer than the index, as much of its prefix is kept as fits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.policy.eviction import PolicyName, policy_named

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    num_tokens: int
    blocks: list[bytes]


@dataclass(slots=True)
class Hits:
    """Hits over all prompts."""

    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_blocks: int = 0
    num_hit_blocks: int = 0

    def add(self, prompt: Prompt, num_matched: int) -> None:
        """Counts one prompt whose first `num_matched` blocks were held."""
        self.num_tokens += prompt.num_tokens
        self.num_hit_tokens += min(prompt.num_tokens, num_matched * BLOCK_TOKENS)
        self.num_blocks += len(prompt.blocks)
        self.num_hit_blocks += num_matched


def read_trace(path: Path) -> list[Prompt]:
    """The requests in order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Prompt(row["input_length"], [block_id(n.to_bytes(16, "big")) for n in row["hash_ids"]]) for row in rows]


def replay(prompts: Iterable[Prompt], policy: PolicyName, max_blocks: int | None) -> Hits:
    """Looks up every prompt and stores its missing blocks; each block counts as one byte of `max_blocks`."""
    catalog = Catalog({Tier.DRAM: policy_named(policy)})
    hits = Hits()
    for prompt in prompts:
        num_matched = len(catalog.match(prompt.blocks, 0.0))
        hits.add(prompt, num_matched)
        held: list[bytes] = []  # a prompt does not evict its own prefix
        for depth, block in enumerate(prompt.blocks):
            parent = prompt.blocks[depth - 1] if depth else None
            if depth >= num_matched and not _store(catalog, BlockMeta(block, parent, depth), max_blocks):
                break
            catalog.hold(block)
            held.append(block)
        for block in held:
            catalog.release(block)
    return hits


def _store(catalog: Catalog, meta: BlockMeta, max_blocks: int | None) -> bool:
    while max_blocks is not None and catalog.num_blocks(Tier.DRAM) >= max_blocks:
        if catalog.pop_victim(Tier.DRAM) is None:
            return False
    catalog.add(meta, Tier.DRAM, 1)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line for each policy and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1_000, 10_000, 50_000])
    options = parser.parse_args(arguments)
    prompts = read_trace(options.trace)
    print(f"{options.trace.name}: {len(prompts)} prompts")
    print(f"{'policy':14}{'blocks':>10}{'tokens hit':>12}{'blocks hit':>12}{'us a block':>12}")
    rows: list[tuple[PolicyName, int | None]] = [("lru", None)]
    rows += [(policy, size) for size in options.blocks for policy in get_args(PolicyName)]
    for policy, size in rows:
        started_s = time.perf_counter()
        hits = replay(prompts, policy, size)
        took_us = (time.perf_counter() - started_s) / hits.num_blocks * 1e6
        tokens, blocks = hits.num_hit_tokens / hits.num_tokens, hits.num_hit_blocks / hits.num_blocks
        print(f"{policy:14}{size or 'all':>10}{tokens:>12.1%}{blocks:>12.1%}{took_us:>12.1f}")


if __name__ == "__main__":
    main()
