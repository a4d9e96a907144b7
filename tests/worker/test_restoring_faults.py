"""What goes wrong in the middle of a restore: a store that hangs, blocks that are damaged, a link that slows down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.kv.codec import Codec
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.store.kvstore_client import KVStoreClient, Lent, LookUp
from halfmoon.worker.store.block_source import BlockSource, Write
from halfmoon.worker.store.source_progress import SourceProgress
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_restorer import PROMPT, SLOW, believe, counted, missed, own_store, stored
from tests.worker.store.test_store_writer import keys_of, single
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of, until

Start = Callable[..., Awaitable[RunningWorker]]
LOAD_ALL = PrefillModel(0.0, 0.02, 0.0)  # 0.16 s a block: slow beside any link, and yet an end is in sight


async def test_a_store_that_hangs_in_the_middle_is_computed_past(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, real = 0, KVStoreClient.read

    async def hanging(self: KVStoreClient, lent: Lent) -> memoryview:
        nonlocal num_read
        num_read += 1
        if num_read > 3:
            worker.patience.hurry()
            await asyncio.Event().wait()
        return await real(self, lent)

    async with served() as (store, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, LOAD_ALL)
        monkeypatch.setattr(KVStoreClient, "read", hanging)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert 0 < first.first_token.num_loaded_tokens <= 24
        await until(lambda: worker.num_used_blocks == 0)
        assert own_store(worker).rate.bytes_under_way == 0
        await until(lambda: not any(entry.num_holds for entry in store.pool.catalog))


@pytest.mark.parametrize("damaged", [0, 5, 9])
@pytest.mark.parametrize("when", ["before it is lent", "while it is lent"])
async def test_a_damaged_block_is_computed(
    start_worker: Start, tiny: Checkpoint, damaged: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as (store, address):
        await stored(start_worker, tiny, address)
        prefill, decode = await start_worker("prefill", store=address), await start_worker("decode")
        believe(prefill, SLOW)
        block = store.pool.dram._blocks[block_id(keys_of(prefill, PROMPT)[damaged])]
        if when == "before it is lent":
            block.room.view[7] ^= 1
        real = KVStoreClient.read

        async def read(self: KVStoreClient, lent: Lent) -> memoryview:
            if lent.digest == block.digest:
                block.room.view[7] ^= 1
            return await real(self, lent)

        if when == "while it is lent":
            monkeypatch.setattr(KVStoreClient, "read", read)
        async with listening(decode) as steps:
            request = single(tiny, PROMPT)
            request.generation.CopyFrom(generation(tiny, PROMPT, 8))
            request.decode_address = decode.peer.address
            first, _ = await prefilled(prefill, request)
            tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
        assert tokens == reference(tiny, PROMPT, 8)
        assert first.first_token.num_loaded_tokens < 80
        assert missed(prefill) >= 1


async def test_loads_that_end_at_once_are_not_the_last(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two end in one turn of the loop, with a part of what they were to bring: the rest is asked for."""
    num_ended, is_second_here, real = 0, asyncio.Event(), BlockSource.load

    async def load(
        self: BlockSource, store: KVStoreClient, keys: Mapping[int, bytes], write: Write, codec: Codec = Codec.RAW
    ) -> list[int]:
        nonlocal num_ended
        loaded = await real(self, store, dict(list(keys.items())[:1]), write, codec)
        num_ended += 1
        if num_ended == 1:
            await is_second_here.wait()
        is_second_here.set()
        return loaded

    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        monkeypatch.setattr(SourceProgress, "most_at_once", 4)
        monkeypatch.setattr(BlockSource, "load", load)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80
        assert missed(worker) == 0


async def test_loads_do_not_wait_for_a_store_that_is_asked_to_fetch(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that its blocks are on its disk, and never answers how many are coming."""
    was_asked, real = asyncio.Event(), KVStoreClient.look_up

    async def look_up(
        self: KVStoreClient, keys: Sequence[bytes], *, deadline_s: float, with_room: bool = False
    ) -> LookUp:
        found = await real(self, keys, deadline_s=deadline_s, with_room=with_room)
        return found._replace(tiers=dict.fromkeys(found.tiers, "disk"))

    async def prefetch(self: KVStoreClient, keys: Sequence[bytes], *, deadline_s: float) -> int:
        was_asked.set()
        await asyncio.Event().wait()
        return len(keys)

    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        monkeypatch.setattr(KVStoreClient, "look_up", look_up)
        monkeypatch.setattr(KVStoreClient, "prefetch", prefetch)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert was_asked.is_set()
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80


async def test_a_link_that_slows_down_is_computed_past(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address, link_mbps=0.1)  # 20 ms a block
        believe(worker, LOAD_ALL)
        events = asyncio.ensure_future(prefilled(worker, single(tiny, PROMPT)))
        await until(lambda: counted(worker, "store_loaded_bytes", tier="dram") > 0)
        worker.state.sources.to(address).client._inbound._seconds_per_byte = 1.0  # half an hour a block
        worker.patience.hurry()
        (first,) = await events
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert 0 < first.first_token.num_loaded_tokens < 80


async def test_several_prompts_restore_at_once(start_worker: Start, tiny: Checkpoint) -> None:
    prompts = [[(7 * i + n) % 125 + 3 for i in range(40 + n)] for n in range(4)]
    async with served() as (_, address):
        before = await start_worker("prefill", store=address)
        for n, prompt in enumerate(prompts):
            await prefilled(before, single(tiny, prompt, f"before-{n}"))
        await before.state.chains.settled()
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        requests = [single(tiny, prompt, f"r-{n}") for n, prompt in enumerate(prompts)]
        all_events = await asyncio.gather(*(prefilled(worker, request) for request in requests))
        for prompt, (event,) in zip(prompts, all_events, strict=True):
            assert [event.first_token.token.token_id] == reference(tiny, prompt, 1)
            assert event.first_token.num_loaded_tokens == (len(prompt) - 1) // 8 * 8
        await until(lambda: worker.num_used_blocks == 0)


async def test_a_store_elsewhere_is_read_by_wire(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.rpc.transport.mapped.host_id", lambda: "another")
    async with served() as (store, address):
        await stored(start_worker, tiny, address)
        assert store.pool.counts.num_stored == 10
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80


@pytest.mark.parametrize("ranks", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
async def test_workers_of_several_ranks_restore(start_worker: Start, tiny: Checkpoint, ranks: dict[str, int]) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address, num_threads=1, **ranks)
        believe(worker, SLOW)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80
        (more,) = await prefilled(worker, single(tiny, [*PROMPT, *PROMPT[:40]], "more"))
        await worker.state.chains.settled()
        again = await start_worker("prefill", store=address)
        believe(again, SLOW)
        (loaded,) = await prefilled(again, single(tiny, [*PROMPT, *PROMPT[:40]], "again"))
        assert loaded.first_token.num_loaded_tokens == 120, "what the ranks computed reached the store"
        assert loaded.first_token.token.token_id == more.first_token.token.token_id
