"""Several stores as one pool, through their own catalogues and the writers' rule: `benchmarks.pool stores`."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from benchmarks.kv.index import BLOCK_TOKENS, Prompt
from benchmarks.pool.stores import PoolRun, TimedPrompt, replay_pool
from halfmoon.catalog.block_identity import block_id

NUM_BLOCKS = 480  # of all stores together


def chats(num_prompts: int, seed: int = 0) -> list[TimedPrompt]:
    """Turns of chats that begin alike, each longer than the one before; old ones end and new ones begin."""
    chance, made, chats, number = random.Random(seed), [], [[0]], 1
    for second in range(num_prompts):
        if len(chats) < 80:
            chats.append([0])
        chat = chats[min(int(chance.expovariate(0.05)), len(chats) - 1)]
        chat += range(number, number + 3)
        number += 3
        if len(chat) > 20:
            chats.remove(chat)
        blocks = [block_id(block.to_bytes(16, "big")) for block in chat]
        made.append(TimedPrompt(float(second), Prompt(len(blocks) * BLOCK_TOKENS, blocks)))
    return made


def ratio(run: PoolRun) -> float:
    return run.hits.num_hit_tokens / run.hits.num_tokens


@pytest.mark.parametrize("policy", ["lru", "cost-aware"])
@pytest.mark.parametrize("spread", ["even", "crowded"])
def test_four_stores_hit_about_as_often_as_one_of_their_size(
    policy: Literal["lru", "cost-aware"], spread: Literal["even", "crowded"]
) -> None:
    prompts = chats(1500)
    one = replay_pool(prompts, policy, [NUM_BLOCKS])
    four = replay_pool(prompts, policy, [NUM_BLOCKS // 4] * 4, spread)
    apart = replay_pool(prompts, policy, [NUM_BLOCKS // 4] * 4, "apart")
    assert 0.2 < ratio(one) < 0.9
    assert ratio(four) > ratio(one) - 0.02 > ratio(apart)
    assert four.num_copies == 0
    for store in four.stores:
        store.catalog.check_integrity()


def test_a_store_that_is_lost_costs_what_it_had_and_nothing_else() -> None:
    prompts = chats(800)
    run = replay_pool(prompts, "lru", [10_000] * 4)
    held = [{entry.meta.id for entry in store.catalog} for store in run.stores]
    assert all(held)
    lost, rest = held[0], set[bytes]().union(*held[1:])
    assert not lost & rest
    last = prompts[-1].prompt.blocks
    left = [store.catalog.find(last, 1e6) for store in run.stores[1:]]
    assert sum(map(len, left)) == len([block for block in last if block not in lost])
