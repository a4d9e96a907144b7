"""What workers compute reaches the store behind the requests: prompts, decoded blocks, each block once, by tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon.catalog.block_identity import block_id
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.step_result import BlockChain
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.pb import prefill_pb2
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.worker.store.chain_queue import ChainQueue
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, tokens_of, until

Start = Callable[..., Awaitable[RunningWorker]]
PROMPT = [(7 * i + 3) % 125 + 3 for i in range(43)]  # 5 blocks of 8
LIMIT_S = 20.0


def keys_of(worker: RunningWorker, tokens: list[int], salt: bytes = b"") -> list[bytes]:
    layout = worker.engine.layout
    return block_keys(root_key(worker.engine.checkpoint.fingerprint, layout, salt), tokens, layout.block_tokens)


def single(tiny: Checkpoint, prompt: list[int], name: str = "r", **changes: Any) -> prefill_pb2.PrefillRequest:
    """Needs no decode worker."""
    wanted = generation(tiny, prompt, 1, name)
    for field, value in changes.items():
        setattr(wanted, field, value)
    return prefill_pb2.PrefillRequest(generation=wanted, decode_address="127.0.0.1:1")


def put_blocks(worker: RunningWorker, outcome: str) -> float:
    return float(worker.metrics.registry.get_sample_value("halfmoon_store_put_blocks_total", {"outcome": outcome}) or 0)


async def test_prompt_and_decoded_blocks_reach_the_store_once(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (store, address):
        prefill, decode = [await start_worker(role, store=address) for role in ("prefill", "decode")]
        async with listening(decode) as steps:
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, PROMPT, 30), decode_address=decode.peer.address
            )
            first, _ = await prefilled(prefill, request)
            tokens = [*PROMPT, first.first_token.token.token_id, *await tokens_of(steps)]
        await prefill.state.chains.settled()
        await decode.state.chains.settled()
        keys = keys_of(prefill, tokens[:-1])  # the last token is never run
        assert len(keys) == 9
        held = store.pool.match([block_id(key) for key in keys])
        assert [entry.meta.depth for entry in held] == list(range(9))
        assert put_blocks(prefill, "stored") + put_blocks(decode, "stored") == 9, "whoever is first"
        assert store.pool.counts.num_stored == 9
        again = await start_worker("prefill", store=address)
        await prefilled(again, single(tiny, tokens[:-1], "again"))
        await again.state.chains.settled()
        assert put_blocks(again, "stored") == 0, "the store had them all"
        assert put_blocks(prefill, "failed") + put_blocks(decode, "failed") == 0


async def test_tenants_share_neither_caches_nor_blocks(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (store, address):
        worker = await start_worker("prefill", store=address)
        cached = []
        for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
            (event,) = await prefilled(worker, single(tiny, PROMPT, name, tenant_salt=salt))
            cached.append(event.first_token.num_cached_tokens)
        assert cached == [0, 0, len(PROMPT) - 1]
        await worker.state.chains.settled()
        for salt in (b"one", b"two"):
            keys = keys_of(worker, PROMPT, salt)
            assert len(store.pool.match([block_id(key, salt) for key in keys])) == 5
            assert not store.pool.match([block_id(key) for key in keys])


async def test_a_tenant_is_charged_for_what_its_prompts_leave(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (store, address):
        worker = await start_worker("prefill", store=address)
        await prefilled(worker, single(tiny, PROMPT, tenant="acme", tenant_kv_quota_bytes=1 << 20))
        await worker.state.chains.settled()
        [account] = store.pool.catalog.tenants
        assert (account.tenant, account.num_blocks, account.quota_bytes) == ("acme", 5, 1 << 20)


async def test_a_store_that_lost_its_blocks_gets_them_again(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (store, address):
        worker = await start_worker("prefill", store=address)
        await prefilled(worker, single(tiny, PROMPT, "a"))
        await worker.state.chains.settled()
        keys = [block_id(key) for key in keys_of(worker, PROMPT)]
        assert store.pool.match(keys)[0].meta.recompute_s > 0
        await store.pool.drop(keys)
        assert not store.pool.match(keys)
        await prefilled(worker, single(tiny, PROMPT, "b"))
        await worker.state.chains.settled()
        assert len(store.pool.match(keys)) == 5


async def test_each_block_is_kept_once_whichever_store_has_it(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (one, first_address), served() as (other, second_address):
        near_one, near_other = [await start_worker("prefill", store=at) for at in (first_address, second_address)]
        for worker in (near_one, near_other):
            await worker.state.sources.name_stores("g", [first_address, second_address])
        longer = [*PROMPT[:40], *PROMPT]
        for worker, prompt, name in ((near_one, PROMPT, "a"), (near_other, longer, "b"), (near_one, longer, "c")):
            await prefilled(worker, single(tiny, prompt, name))
            await worker.state.chains.settled()
        keys = keys_of(near_one, longer)
        assert (one.pool.counts.num_stored, other.pool.counts.num_stored) == (5, 5)
        assert list(one.pool.find([block_id(key) for key in keys])) == list(range(5))
        assert list(other.pool.find([block_id(key) for key in keys])) == list(range(5, 10))
        assert (put_blocks(near_other, "stored"), put_blocks(near_other, "elsewhere")) == (5, 5)
        assert put_blocks(near_one, "stored") == 5, "the second time all was there"
        await one.pool.drop([block_id(key) for key in keys])
        await prefilled(near_other, single(tiny, longer, "d"))
        await near_other.state.chains.settled()
        assert list(other.pool.find([block_id(key) for key in keys])) == list(range(10)), "what was lost comes again"
        other.pool.catalog.check_integrity()


async def test_a_full_or_absent_store_spills_to_another(start_worker: Start, tiny: Checkpoint) -> None:
    async with served(dram_bytes=2 * 2048) as (small, small_address), served() as (large, large_address):
        full, away = [await start_worker("prefill", store=at) for at in (small_address, "127.0.0.1:1")]
        for worker in (full, away):
            await worker.state.sources.name_stores("g", [small_address, large_address])
        await prefilled(full, single(tiny, PROMPT[:17], "a"))  # two blocks
        await full.state.chains.settled()
        assert (put_blocks(full, "stored"), small.pool.counts.num_stored) == (2, 2)
        await prefilled(full, single(tiny, PROMPT, "b"))
        await full.state.chains.settled()
        assert (put_blocks(full, "spilled"), large.pool.counts.num_stored) == (3, 3)
        await prefilled(away, single(tiny, PROMPT[1:], "c"))
        await away.state.chains.settled()
        assert (put_blocks(away, "spilled"), put_blocks(away, "failed")) == (5, 0)


async def test_a_store_that_is_away_or_full_costs_a_count(start_worker: Start, tiny: Checkpoint) -> None:
    async with served(dram_bytes=2 * 2048) as (_, address):  # of 2 KiB blocks
        full = await start_worker("prefill", store=address)
        away = await start_worker("prefill", store="127.0.0.1:1")
        for worker in (full, away):
            (event,) = await prefilled(worker, single(tiny, PROMPT))
            assert event.first_token.token.token_id
            await worker.state.chains.settled()
            await until(lambda: worker.num_used_blocks == 0)  # noqa: B023 - asked at once
        assert put_blocks(full, "stored") == 2
        assert (put_blocks(full, "failed"), put_blocks(away, "failed")) == (3, 5), "blocks"


async def test_a_queue_keeps_the_newest_chain_of_a_request_and_no_more_than_it_may() -> None:
    dropped: list[None] = []
    queue = ChainQueue(2, lambda: dropped.append(None))
    queue.offer([BlockChain(name, (name.encode(),)) for name in "abc"])
    queue.offer([BlockChain("a", (b"a", b"more"))])
    assert len(dropped) == 1
    assert [(await queue.take()).keys for _ in range(2)] == [(b"a", b"more"), (b"b",)]
    waiting = asyncio.ensure_future(queue.settled())
    queue.done()
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done()
    await waiting
    ChainQueue(0).offer([BlockChain("a", (b"a",))])


async def test_a_client_of_another_tenant_shares_the_channels() -> None:
    async with served() as (_, address):
        client = KVStoreClient(address)
        assert await client.of_tenant(b"one").match([bytes(16)], deadline_s=LIMIT_S) == []
        await client.close()
