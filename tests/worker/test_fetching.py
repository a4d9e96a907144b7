"""A prefix that only others have: fetched from whoever they are, whatever becomes of them, and never wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.errors import HalfmoonError, Incompatible, NoCapacity, NotFound, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.pb import prefill_pb2
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.worker.membership.block_feed import CachedBlocks
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from halfmoon.worker.store.holder import NamedHolder
from halfmoon.worker.store.load_rate import LoadRate
from tests.rpc.store.test_kvstore_client import client, served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_restorer import PROMPT, SLOW, believe, counted, own_store, stored
from tests.worker.store.test_store_writer import keys_of, single
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of, until

Start = Callable[..., Awaitable[RunningWorker]]
LOAD_ALL = PrefillModel(0.0, 0.02, 0.0)  # 0.16 s a block: slow beside any link, and yet an end is in sight


def naming(
    request: prefill_pb2.PrefillRequest, *workers: RunningWorker | str, num_blocks: int = 10
) -> prefill_pb2.PrefillRequest:
    """The request, with these workers (or addresses of stores) as its sources."""
    for one in workers:
        source = request.sources.add(num_blocks=num_blocks)
        source.address = one if isinstance(one, str) else one.peer.address
        source.kind = prefill_pb2.KVSource.STORE if isinstance(one, str) else prefill_pb2.KVSource.WORKER
    return request


async def warm(
    start_worker: Start, tiny: Checkpoint, num_tokens: int = len(PROMPT), **options: object
) -> RunningWorker:
    """A worker that has the prompt in its prefix cache. Readers may hold 32 of its blocks."""
    worker = await start_worker("prefill", num_blocks=256, **options)
    await prefilled(worker, single(tiny, PROMPT[:num_tokens], "before"))
    return worker


async def cached(worker: RunningWorker) -> list[bytes]:
    """The bytes of the prompt's blocks in a worker's prefix cache."""
    async with worker.async_engine.cached(keys_of(worker, PROMPT)) as blocks:
        return [bytes(await worker.async_engine.read_block(block)) for block in blocks]


async def forget(worker: RunningWorker) -> None:
    """Empties a worker's prefix cache."""
    async with worker.async_engine.cached([]):
        worker.engine.forget_prefixes()
    worker.state.cached_blocks = CachedBlocks()


def break_reads(monkeypatch: pytest.MonkeyPatch, error: HalfmoonError) -> None:
    """Every cache serves two reads, all of them together, and then fails."""
    real, num_reads = CacheServicer._frames, 0

    async def breaking(self: CacheServicer, *arguments: object) -> object:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 2:
            raise error
        async for frame in real(self, *arguments):  # type: ignore[arg-type]
            yield frame

    monkeypatch.setattr(CacheServicer, "_frames", breaking)


def sources(worker: RunningWorker, kind: str, outcome: str) -> float:
    return counted(worker, "fetch_sources", kind=kind, outcome=outcome)


async def test_a_prefix_is_fetched_from_another_worker_and_then_kept(start_worker: Start, tiny: Checkpoint) -> None:
    holder, decode = await warm(start_worker, tiny), await start_worker("decode")
    worker = await start_worker("prefill")  # it has no store
    believe(worker, SLOW)
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(generation=generation(tiny, PROMPT, 12))
        request.decode_address = decode.peer.address
        first, _ = await prefilled(worker, naming(request, holder))
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, PROMPT, 12)
    assert (first.first_token.num_cached_tokens, first.first_token.num_loaded_tokens) == (80, 80)
    assert counted(worker, "restored_tokens", source="worker") == 80
    assert sources(worker, "worker", "here") == 1
    assert worker.state.cached_blocks.depth(keys_of(worker, PROMPT)) == 10, "what it fetched it reports"
    (again,) = await prefilled(worker, single(tiny, PROMPT, "again"))
    assert (again.first_token.num_cached_tokens, again.first_token.num_loaded_tokens) == (len(PROMPT) - 1, 0)
    await until(lambda: worker.num_used_blocks + holder.num_used_blocks == 0)
    (speed,) = worker.restorer.holders.speeds()
    assert (speed.address, speed.is_inbound, speed.waiting_bytes) == (holder.peer.address, True, 0)


async def test_a_holder_that_was_slow_once_is_asked_again(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, PrefillModel(0.0, 0.0025, 0.0))  # 20 ms a block
        own_store(worker).rate.observe("dram", 2048, 0.1)
        loaded = []
        for number in range(100):
            (event,) = await prefilled(worker, single(tiny, PROMPT, str(number)))
            loaded.append(event.first_token.num_loaded_tokens)
            if loaded[-1]:
                break
            await forget(worker)
        assert loaded[:3] == [0, 0, 0]
        assert loaded[-1] > 0


async def test_a_slow_holder_beside_a_quick_one_is_asked_again(start_worker: Start, tiny: Checkpoint) -> None:
    """And until something came from there, its speed is reported as it was measured."""
    slow, quick, worker = await warm(start_worker, tiny), await warm(start_worker, tiny), await start_worker("prefill")
    believe(worker, SLOW)
    rates = [worker.restorer.holders._get(NamedHolder(one.peer.address, "worker")).rate for one in (slow, quick)]
    for rate, seconds in zip(rates, (0.5, 0.01), strict=True):
        rate.observe("dram", 2048, seconds)
    before = rates[0].measured
    for number in range(100):
        (event,) = await prefilled(worker, naming(single(tiny, PROMPT, str(number)), slow, quick))
        assert event.first_token.num_loaded_tokens == 80
        if rates[0].measured != before:
            break
        assert slow.metrics.registry.get_sample_value("halfmoon_cache_served_bytes_total") == 0
        rates[1] = _known_to_take(rates[1], 0.01)
        await forget(worker)
    assert number > 3
    assert rates[0].measured != before


def _known_to_take(rate: LoadRate, block_s: float) -> LoadRate:
    """However quick it was."""
    rate._s_per_byte["dram"] = block_s / 2048
    return rate


async def test_codecs_are_chosen_for_what_is_loaded_alone(start_worker: Start, tiny: Checkpoint) -> None:
    holder, worker = await warm(start_worker, tiny), await start_worker("prefill")
    believe(worker, PrefillModel(0.0, 1e-9, 0.0))  # nothing is worth loading
    await prefilled(worker, naming(single(tiny, PROMPT), holder))
    assert sources(worker, "worker", "here") == 1
    assert (
        worker.metrics.registry.get_sample_value("halfmoon_fetch_codecs_total", {"codec": "raw", "reason": "measuring"})
        is None
    )


async def test_over_a_slow_link_blocks_travel_compressed(start_worker: Start, tiny: Checkpoint) -> None:
    """The first fetch tells what the link does; the next one is exact, too."""
    holder = await warm(start_worker, tiny, dtype="bfloat16")
    worker = await start_worker("prefill", dtype="bfloat16", link_mbps=0.1)
    believe(worker, SLOW)
    assert worker.restorer.codecs is not None
    await worker.restorer.codecs.measure()
    tokens = []
    for number in range(2):
        (first,) = await prefilled(worker, naming(single(tiny, PROMPT, f"{number}"), holder))
        assert first.first_token.num_loaded_tokens == 80
        tokens.append(first.first_token.token.token_id)
        content = [await cached(one) for one in (worker, holder)]
        assert content[0] == content[1]
        await forget(worker)
    assert len(set(tokens)) == 1
    assert counted(worker, "fetch_codecs", codec="raw", reason="measuring") == 1
    assert sum(counted(worker, "fetch_codecs", codec=codec, reason="quickest") for codec in ("lz4", "zstd")) == 1
    with worker.restorer.holders._get(NamedHolder(holder.peer.address, "worker")).use(b"") as client:
        ((codec, sizes),) = client.inbound.take_sizes().items()
        assert codec is not Codec.RAW
        assert sizes.encoded_bytes < 0.9 * sizes.raw_bytes


async def test_several_sources_share_the_load(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        holders = [await warm(start_worker, tiny) for _ in range(2)]
        worker = await start_worker("prefill", store=address, link_mbps=0.1)  # 20 ms a block from each
        believe(worker, SLOW)
        (first,) = await prefilled(worker, naming(single(tiny, PROMPT), *holders))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80
        from_store, from_workers = (counted(worker, "store_loaded_bytes", tier=tier) for tier in ("dram", "worker"))
        assert from_store > 0
        assert from_workers > 0
        assert from_store + from_workers == 10 * worker.engine.layout.block_bytes, "no block is brought twice"


async def test_a_source_that_has_more_than_the_store_brings_the_rest(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        before = await start_worker("prefill", store=address)
        await prefilled(before, single(tiny, PROMPT[:30], "before"))
        await before.state.chains.settled()
        holder, worker = await warm(start_worker, tiny), await start_worker("prefill", store=address)
        believe(worker, SLOW)
        (first,) = await prefilled(worker, naming(single(tiny, PROMPT), holder))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80
        assert counted(worker, "store_loaded_bytes", tier="worker") >= 7 * worker.engine.layout.block_bytes


async def test_a_prefix_in_fragments_on_two_stores_is_whole(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (first_store, first), served() as (second_store, second):
        await stored(start_worker, tiny, first)
        await stored(start_worker, tiny, second)
        keys = keys_of(await start_worker("prefill"), PROMPT)
        for place, key in enumerate(keys):
            (first_store if place % 3 else second_store).pool.catalog.lose(block_id(key), Tier.DRAM)
        worker = await start_worker("prefill", store=first)
        await worker.state.sources.name_stores("gateway:1", [first, second])
        believe(worker, SLOW)
        (event,) = await prefilled(worker, single(tiny, PROMPT))
        assert [event.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert event.first_token.num_loaded_tokens == 80


async def test_a_source_that_is_away_or_unknown_costs_no_token(start_worker: Start, tiny: Checkpoint) -> None:
    holder = await warm(start_worker, tiny)
    worker = await start_worker("prefill")
    believe(worker, SLOW)
    request = naming(single(tiny, PROMPT), "127.0.0.1:1", holder)  # no gateway has named this store
    request.sources.add(address="127.0.0.1:1", kind=prefill_pb2.KVSource.WORKER, num_blocks=10)
    (first,) = await prefilled(worker, request)
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 80
    assert sources(worker, "store", "away") == 1


async def test_a_stale_directory_is_a_miss_and_counted(start_worker: Start, tiny: Checkpoint) -> None:
    short, empty = await warm(start_worker, tiny, 43), await start_worker("prefill")
    worker = await start_worker("prefill")
    believe(worker, SLOW)
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), short, empty))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 40
    assert sources(worker, "worker", "stale") == 2


async def test_a_source_that_hangs_is_replaced_by_another(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, good = await warm(start_worker, tiny), await warm(start_worker, tiny)
    worker = await start_worker("prefill")
    believe(worker, SLOW)

    async def never(block: int, layers: range | None = None) -> memoryview:
        worker.patience.hurry()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(hanging.async_engine, "read_block", never)
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), hanging, good))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 80
    assert sources(worker, "worker", "slow") == 1
    await until(lambda: hanging.num_used_blocks == 0)


@pytest.mark.parametrize("lost", [0, 4, 9])
async def test_a_holder_that_evicts_what_it_promised_is_replaced(
    start_worker: Start, tiny: Checkpoint, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle, good = await warm(start_worker, tiny), await warm(start_worker, tiny)
    worker = await start_worker("prefill")
    believe(worker, SLOW)
    key, held = keys_of(worker, PROMPT)[lost], fickle.engine.hold_cached

    def hold_cached(keys: list[bytes]) -> list[int]:
        return held(keys[: keys.index(key)] if key in keys else keys)

    monkeypatch.setattr(fickle.engine, "hold_cached", hold_cached)
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), fickle, good))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 80


async def test_a_holder_that_dies_in_the_middle_leaves_the_rest_to_others(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = await warm(start_worker, tiny)
    worker = await start_worker("prefill", link_mbps=0.1)
    believe(worker, LOAD_ALL)
    break_reads(monkeypatch, NoCapacity("busy"))
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), dying))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert 0 < first.first_token.num_loaded_tokens < 80
    assert sources(worker, "worker", "busy") == 1
    await until(lambda: worker.num_used_blocks == 0)


def by_layer(worker: RunningWorker, holder: RunningWorker) -> None:
    """Has the worker believe in a step long enough to hide a load, and in a link of 0.02 MB/s."""
    believe(worker, PrefillModel(1.6, 0.1, 0.0))
    known = worker.restorer.holders._get(NamedHolder(holder.peer.address, "worker"))
    known.rate.observe("dram", 20_000, 1.0)


async def test_what_follows_a_prefix_is_computed_while_its_layers_arrive(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, decode = await warm(start_worker, tiny), await start_worker("decode")
    worker = await start_worker("prefill", link_mbps=0.02)
    by_layer(worker, holder)
    gates, real = [], worker.engine.arrive_by_layer

    def arrive_by_layer(request_id: str, gate: LayerGate) -> None:
        gates.append(gate)
        real(request_id, gate)

    monkeypatch.setattr(worker.engine, "arrive_by_layer", arrive_by_layer)
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(generation=generation(tiny, PROMPT, 12))
        request.decode_address = decode.peer.address
        first, _ = await prefilled(worker, naming(request, holder))
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, PROMPT, 12)
    assert first.first_token.num_loaded_tokens == 80
    assert counted(worker, "restore_decisions", method="layers") == 1
    assert len(gates) == 1, "a step was allowed to wait"
    assert worker.state.cached_blocks.depth(keys_of(worker, PROMPT)) == 10
    await until(lambda: worker.num_used_blocks + holder.num_used_blocks == 0)


@pytest.mark.parametrize("num_frames", [0, 12, 19])
async def test_a_holder_that_dies_between_two_layers_costs_no_token(
    start_worker: Start, tiny: Checkpoint, num_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = await warm(start_worker, tiny)
    worker = await start_worker("prefill", link_mbps=0.02)
    by_layer(worker, dying)
    real = CacheServicer._frames

    async def breaking(self: CacheServicer, *arguments: object) -> object:
        left = num_frames
        async for frame in real(self, *arguments):  # type: ignore[arg-type]
            if not left:
                raise Unavailable("it dies")
            left -= 1
            yield frame

    monkeypatch.setattr(CacheServicer, "_frames", breaking)
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), dying))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 0, "half-loaded blocks count for nothing"
    assert counted(worker, "restore_decisions", method="layers") == 1
    assert sources(worker, "worker", "away") == 1
    await until(lambda: worker.num_used_blocks == 0)


@pytest.mark.parametrize("num_served", [1, 4, 9])
async def test_what_a_holder_serves_of_a_get_by_layer_is_loaded_and_the_rest_by_block(
    start_worker: Start, tiny: Checkpoint, num_served: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reader came between the plan and the Get. The only source stays one."""
    holder, worker = await warm(start_worker, tiny), await start_worker("prefill", link_mbps=0.02)
    by_layer(worker, holder)
    monkeypatch.setattr(CacheServicer, "_reading", lambda self, num_blocks: nullcontext(num_served))
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), holder))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 80
    assert counted(worker, "restore_decisions", method="layers") == 1
    assert sources(worker, "worker", "failed") == 0
    await until(lambda: worker.num_used_blocks + holder.num_used_blocks == 0)


async def test_no_more_is_planned_by_layer_than_a_reader_may_hold(start_worker: Start, tiny: Checkpoint) -> None:
    holder = await start_worker("prefill", num_blocks=64)  # readers may hold eight blocks, one reader four
    await prefilled(holder, single(tiny, PROMPT, "before"))
    worker = await start_worker("prefill", link_mbps=0.02)
    by_layer(worker, holder)
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), holder))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert first.first_token.num_loaded_tokens == 80
    assert counted(worker, "restore_decisions", method="layers") == 0
    await until(lambda: worker.num_used_blocks + holder.num_used_blocks == 0)


async def test_two_readers_by_layer_at_once_are_both_served(start_worker: Start, tiny: Checkpoint) -> None:
    holder = await start_worker(
        "prefill", num_blocks=160
    )  # of 20 blocks that readers may hold ten for one, five for two
    await prefilled(holder, single(tiny, PROMPT, "before"))
    workers = [await start_worker("prefill", link_mbps=0.02) for _ in range(2)]
    for worker in workers:
        by_layer(worker, holder)
    results = await asyncio.gather(*(prefilled(one, naming(single(tiny, PROMPT), holder)) for one in workers))
    for (first,) in results:
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80
    await until(lambda: sum(worker.num_used_blocks for worker in (holder, *workers)) == 0)


@pytest.mark.parametrize("lost", [1, 5, 9])
async def test_layers_of_what_precedes_an_evicted_block_are_kept(
    start_worker: Start, tiny: Checkpoint, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle, worker = await warm(start_worker, tiny), await start_worker("prefill", link_mbps=0.02)
    by_layer(worker, fickle)
    key, held = keys_of(worker, PROMPT)[lost], fickle.engine.hold_cached

    def hold_cached(keys: list[bytes]) -> list[int]:
        return held(keys[: keys.index(key)] if key in keys else keys)

    monkeypatch.setattr(fickle.engine, "hold_cached", hold_cached)
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), fickle))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert 8 * lost <= first.first_token.num_loaded_tokens < 80
    assert counted(worker, "restore_decisions", method="layers") == 1
    await until(lambda: worker.num_used_blocks + fickle.num_used_blocks == 0)


async def test_another_tenants_prefix_is_never_served(start_worker: Start, tiny: Checkpoint) -> None:
    holder = await start_worker("prefill", num_blocks=256)
    await prefilled(holder, single(tiny, PROMPT, "before", tenant_salt=b"one"))
    worker = await start_worker("prefill")
    believe(worker, SLOW)
    loaded = []
    for salt in (b"", b"two", b"one"):
        (event,) = await prefilled(worker, naming(single(tiny, PROMPT, str(salt), tenant_salt=salt), holder))
        loaded.append(event.first_token.num_loaded_tokens)
    assert loaded == [0, 0, 80]


@pytest.mark.parametrize("kind", ["worker", "store"])
async def test_kv_of_another_dtype_is_a_miss(start_worker: Start, tiny: Checkpoint, kind: str) -> None:
    """Where the gateway believes in it all the same. Asked for outright, it is refused."""
    async with served() as (_, address):
        holder = await warm(start_worker, tiny, dtype="float16", store=address if kind == "store" else None)
        await holder.state.chains.settled()
        worker = await start_worker("prefill", store=address if kind == "store" else None)
        believe(worker, SLOW)
        request = single(tiny, PROMPT)
        (first,) = await prefilled(worker, naming(request, holder) if kind == "worker" else request)
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 0
        assert sources(worker, kind, "here") == 0
        async with (
            client(holder.peer.address if kind == "worker" else address) as it,
            aclosing(it.get_run(keys_of(holder, PROMPT), worker.engine.layout, deadline_s=20.0)) as blocks,
        ):
            with pytest.raises(Incompatible, match="another KV layout"):
                await anext(blocks)


async def test_two_requests_for_one_prefix_move_it_once(start_worker: Start, tiny: Checkpoint) -> None:
    holder = await warm(start_worker, tiny)
    worker = await start_worker("prefill", num_blocks=128, link_mbps=0.1)
    believe(worker, SLOW)
    prompts = [[*PROMPT[:80], *range(5, 10 + n)] for n in range(3)]
    requests = [naming(single(tiny, prompt, f"r{n}"), holder) for n, prompt in enumerate(prompts)]
    results = await asyncio.gather(*(prefilled(worker, request) for request in requests))
    for prompt, (event,) in zip(prompts, results, strict=True):
        assert [event.first_token.token.token_id] == reference(tiny, prompt, 1)
        assert event.first_token.num_cached_tokens >= 80  # and what another of them had of its tokens behind
    assert counted(worker, "store_loaded_bytes", tier="worker") == 10 * worker.engine.layout.block_bytes
    assert counted(worker, "restore_decisions", method="shared") == 2


async def test_many_workers_fetch_from_one(start_worker: Start, tiny: Checkpoint) -> None:
    """A storm on one holder: whatever it refuses is computed."""
    holder = await start_worker("prefill", num_blocks=32)  # readers may hold four blocks
    await prefilled(holder, single(tiny, PROMPT, "before"))
    workers = [await start_worker("prefill") for _ in range(6)]
    for worker in workers:
        believe(worker, LOAD_ALL)
    calls = [prefilled(worker, naming(single(tiny, PROMPT), holder)) for worker in workers]
    own = prefilled(holder, single(tiny, PROMPT[:50], "own"))
    (own_event,), *results = await asyncio.gather(own, *calls)
    assert [own_event.first_token.token.token_id] == reference(tiny, PROMPT[:50], 1)
    for (event,) in results:
        assert [event.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    await until(lambda: sum(worker.num_used_blocks for worker in (holder, *workers)) == 0)


async def test_a_storm_spreads_over_all_that_have_a_copy(start_worker: Start, tiny: Checkpoint) -> None:
    holders = [await start_worker("prefill", num_blocks=64) for _ in range(2)]  # readers may hold eight blocks
    for holder in holders:
        await prefilled(holder, single(tiny, PROMPT, "before"))
    workers = [await start_worker("prefill", link_mbps=0.1) for _ in range(6)]
    for worker in workers:
        believe(worker, LOAD_ALL)
    results = await asyncio.gather(*(prefilled(one, naming(single(tiny, PROMPT), *holders)) for one in workers))
    for (event,) in results:
        assert [event.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    served = [holder.metrics.registry.get_sample_value("halfmoon_cache_served_bytes_total") for holder in holders]
    assert all(served), "every reader asks both"
    await until(lambda: sum(worker.num_used_blocks for worker in (*holders, *workers)) == 0)


async def test_a_copy_is_there_before_its_prefix_is_asked_for(start_worker: Start, tiny: Checkpoint) -> None:
    holder, worker = await warm(start_worker, tiny), await start_worker("prefill")
    believe(worker, SLOW)
    copy = naming(single(tiny, PROMPT[:81], "copy"), holder)
    copy.is_copy = True
    (event,) = await prefilled(worker, copy)
    assert event.first_token.num_loaded_tokens == 80
    (first,) = await prefilled(worker, naming(single(tiny, PROMPT), holder))
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert (first.first_token.num_cached_tokens, first.first_token.num_loaded_tokens) == (81, 0)
    assert counted(worker, "store_loaded_bytes", tier="worker") == 10 * worker.engine.layout.block_bytes
    await until(lambda: worker.num_used_blocks + holder.num_used_blocks == 0)


async def test_a_copy_whose_holder_dies_in_the_middle_is_not_computed(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, worker = await warm(start_worker, tiny), await start_worker("prefill")
    believe(worker, SLOW)
    break_reads(monkeypatch, Unavailable("it dies"))
    copy = naming(single(tiny, PROMPT[:81], "copy"), dying)
    copy.is_copy = True
    with pytest.raises(Unavailable, match="have failed"):
        await prefilled(worker, copy)
    assert counted(worker, "restored_tokens", source="computed") == 0
    await until(lambda: worker.num_used_blocks == 0)


async def test_a_copy_that_was_evicted_before_it_was_read_is_not_computed(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle, worker = await warm(start_worker, tiny), await start_worker("prefill")
    believe(worker, SLOW)
    monkeypatch.setattr(fickle.engine, "hold_cached", lambda keys: [])
    copy = naming(single(tiny, PROMPT[:81], "copy"), fickle)
    copy.is_copy = True
    with pytest.raises(Unavailable, match="have failed"):
        await prefilled(worker, copy)
    assert counted(worker, "restored_tokens", source="computed") == 0
    await until(lambda: worker.num_used_blocks == 0)


async def test_a_copy_that_nobody_has_computes_nothing(start_worker: Start, tiny: Checkpoint) -> None:
    empty, worker = await start_worker("prefill"), await start_worker("prefill")
    believe(worker, SLOW)
    for sources in ((), (empty,)):
        copy = naming(single(tiny, PROMPT[:81], f"copy-{len(sources)}"), *sources)
        copy.is_copy = True
        with pytest.raises(NotFound):
            await prefilled(worker, copy)
    assert worker.state.cached_blocks.depth(keys_of(worker, PROMPT)) == 0
    await until(lambda: worker.num_used_blocks == 0)


async def test_links_to_workers_that_are_not_used_are_closed(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    real = KVStoreClient.close

    async def close(self: KVStoreClient) -> None:
        closed.append(self._peer.address)
        await real(self)

    monkeypatch.setattr(KVStoreClient, "close", close)
    monkeypatch.setattr("halfmoon.worker.store.holder._MAX_HOLDERS", 1)
    first, second, worker = (
        await warm(start_worker, tiny),
        await warm(start_worker, tiny),
        await start_worker("prefill"),
    )
    believe(worker, SLOW)
    for number, holder in enumerate((first, second)):
        await prefilled(worker, naming(single(tiny, PROMPT[: 40 + 16 * number], str(number)), holder))
    assert closed == [first.peer.address]
