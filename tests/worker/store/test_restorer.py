"""A known prefix comes back from the store: the same tokens, counted as cached, whatever fails on the way."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.kv.kv_policy import H2O, SNAPKV, KVPolicy, policy_salt
from halfmoon.pb import prefill_pb2
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.worker.membership.compute_rate import ComputeRate
from halfmoon.worker.servicers.prefill_request_scope import PrefillRequestScope
from halfmoon.worker.store.holder import Holder
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_store_writer import keys_of, single
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of, until

Start = Callable[..., Awaitable[RunningWorker]]
PROMPT = [(7 * i + 3) % 125 + 3 for i in range(83)]  # 10 blocks of 8
SLOW = PrefillModel(0.0, 10.0, 0.0)  # whoever computes so slowly loads everything


class KnownRate(ComputeRate):
    """Steps are said to take so long, whatever they take."""

    def __init__(self, model: PrefillModel) -> None:
        super().__init__()
        self._known = model

    @property
    def model(self) -> PrefillModel:
        return self._known


def believe(worker: RunningWorker, model: PrefillModel) -> None:
    worker.state.compute_rate = KnownRate(model)


def counted(worker: RunningWorker, metric: str, **labels: str) -> float:
    return float(worker.metrics.registry.get_sample_value(f"halfmoon_{metric}_total", labels) or 0)


def own_store(worker: RunningWorker) -> Holder:
    holder = worker.restorer.holders.own
    assert holder is not None
    return holder


def missed(worker: RunningWorker) -> float:
    (metric,) = worker.metrics.store.missed_blocks.collect()
    return sum(float(sample.value) for sample in metric.samples if sample.name.endswith("_total"))


async def stored(start_worker: Start, tiny: Checkpoint, address: str) -> None:
    """The prompt is in the store, from a worker that is not asked again."""
    worker = await start_worker("prefill", store=address)
    await prefilled(worker, single(tiny, PROMPT, "before"))
    await worker.state.chains.settled()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_decode_gets_what_was_loaded_and_goes_on_as_if_it_was_computed(
    start_worker: Start, tiny: Checkpoint, codec: str
) -> None:
    async with served(dram_codec=codec) as (_, address):
        await stored(start_worker, tiny, address)
        prefill, decode = await start_worker("prefill", store=address), await start_worker("decode")
        believe(prefill, SLOW)
        async with listening(decode) as steps:
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, PROMPT, 12), decode_address=decode.peer.address
            )
            first, done = await prefilled(prefill, request)
            tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
        assert tokens == reference(tiny, PROMPT, 12)
        assert (first.first_token.num_cached_tokens, first.first_token.num_loaded_tokens) == (80, 80)
        assert done.handed_over.kv_bytes == len(PROMPT) * decode.engine.layout.token_bytes
        sources = {one: counted(prefill, "restored_tokens", source=one) for one in ("cache", "store", "computed")}
        assert sources == {"cache": 0, "store": 80, "computed": 3}
        assert counted(prefill, "restore_decisions", method="load") == 1
        assert counted(prefill, "store_loaded_bytes", tier="dram") == 10 * decode.engine.layout.block_bytes
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "own"])
async def test_quantised_kv_comes_back_from_the_store_as_it_was(
    start_worker: Start, tiny: Checkpoint, codec: str, kv_dtype: str
) -> None:
    async with served(dram_codec=kv_dtype if codec == "own" else codec) as (_, address):
        first = await start_worker("prefill", store=address, kv_dtype=kv_dtype)
        again = await start_worker("prefill", store=address, kv_dtype=kv_dtype)
        believe(again, SLOW)
        tokens = []
        for prefill in (first, again):
            decode = await start_worker("decode", kv_dtype=kv_dtype)
            async with listening(decode) as steps:
                request = prefill_pb2.PrefillRequest(
                    generation=generation(tiny, PROMPT, 12), decode_address=decode.peer.address
                )
                event, done = await prefilled(prefill, request)
                tokens.append([event.first_token.token.token_id, *await tokens_of(steps)])
            assert done.handed_over.kv_bytes == len(PROMPT) * decode.engine.layout.token_bytes
            await first.state.chains.settled()
        assert tokens[0] == tokens[1]
        assert counted(again, "restored_tokens", source="store") == 80
        assert counted(again, "store_loaded_bytes", tier="dram") == 10 * again.engine.layout.block_bytes
        other = await start_worker("prefill", store=address)  # whose KV has numbers, and keys of its own
        believe(other, SLOW)
        (event,) = await prefilled(other, single(tiny, PROMPT, "other"))
        assert event.first_token.num_loaded_tokens == 0


@pytest.mark.parametrize(
    ("policy", "num_loaded"),
    [(KVPolicy(3, 12), 80), (KVPolicy(12, 10, SNAPKV), 48), (KVPolicy(12, 10, H2O), 0)],
    ids=str,
)
async def test_under_a_policy_the_store_gives_what_was_computed_under_it(
    start_worker: Start, tiny: Checkpoint, policy: KVPolicy, num_loaded: int
) -> None:
    """Of a prompt that is chosen from, the last 32 tokens are computed, or all: they choose."""
    async with served() as (_, address):
        first, again = [await start_worker("prefill", store=address) for _ in range(2)]
        believe(again, SLOW)
        tokens, sent = [], []
        for prefill in (first, again):
            decode = await start_worker("decode")
            async with listening(decode) as steps:
                wanted = generation(tiny, PROMPT, 12)
                wanted.tenant_salt = policy_salt(policy, b"")
                request = prefill_pb2.PrefillRequest(generation=wanted, decode_address=decode.peer.address)
                event, done = await prefilled(prefill, request)
                tokens.append([event.first_token.token.token_id, *await tokens_of(steps)])
            sent.append(done.handed_over.kv_bytes)
            await first.state.chains.settled()
            await until(lambda both=(prefill, decode): sum(worker.num_used_blocks for worker in both) == 0)  # type: ignore[misc]
        assert tokens[0] == tokens[1]
        assert sent[0] == sent[1]
        assert counted(again, "restored_tokens", source="store") == num_loaded
        (whole,) = await prefilled(again, single(tiny, PROMPT, "whole"))
        assert whole.first_token.num_cached_tokens == 0
        assert [whole.first_token.token.token_id] == reference(tiny, PROMPT, 1)


async def test_what_the_own_cache_has_is_not_asked_for(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("both", store=address)
        believe(worker, SLOW)
        (first,) = await prefilled(worker, single(tiny, PROMPT[:30], "short"))
        assert first.first_token.num_loaded_tokens == 24
        (second,) = await prefilled(worker, single(tiny, PROMPT, "long"))
        assert (second.first_token.num_cached_tokens, second.first_token.num_loaded_tokens) == (80, 56)
        async with listening(worker) as steps:
            request = prefill_pb2.PrefillRequest(generation=generation(tiny, PROMPT, 8))
            kept, _ = await prefilled(worker, request)
            assert (kept.first_token.num_cached_tokens, kept.first_token.num_loaded_tokens) == (len(PROMPT) - 1, 0)
            tokens = [kept.first_token.token.token_id, *await tokens_of(steps)]
        assert tokens == reference(tiny, PROMPT, 8)


async def test_a_fast_worker_computes(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, PrefillModel(0.0, 1e-9, 0.0))
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert first.first_token.num_cached_tokens == 0
        assert counted(worker, "restore_decisions", method="compute") == 1


@pytest.mark.parametrize("lost", [0, 4, 9])
async def test_a_block_that_vanished_is_computed(
    start_worker: Start, tiny: Checkpoint, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(tiny, PROMPT, 1)
    async with served() as (store, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        key = keys_of(worker, PROMPT)[lost]
        look_up = KVStoreClient.look_up

        async def then_lose(self: KVStoreClient, keys: Any, *, deadline_s: float) -> Any:
            found = await look_up(self, keys, deadline_s=deadline_s)
            store.pool.catalog.lose(block_id(key), Tier.DRAM)
            return found

        monkeypatch.setattr(KVStoreClient, "look_up", then_lose)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert [first.first_token.token.token_id] == expected
        assert missed(worker) >= 1
        assert worker.engine.stats().num_running == 0


async def test_a_store_that_dies_in_the_middle_costs_no_token(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address, link_mbps=0.02)  # a tenth of a second a block
        believe(worker, SLOW)
        events = asyncio.ensure_future(prefilled(worker, single(tiny, PROMPT)))
        await until(lambda: counted(worker, "store_loaded_bytes", tier="dram") > 0)
    (first,) = await events
    assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
    assert 0 < first.first_token.num_loaded_tokens < 80


async def test_a_cancelled_request_ends_its_loads(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (store, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address, link_mbps=0.001)
        believe(worker, SLOW)
        async with worker.peer.stream(worker.prefill.Prefill, single(tiny, PROMPT), deadline_s=60) as events:
            waiting = asyncio.ensure_future(anext(events))
            await until(lambda: own_store(worker).rate.bytes_under_way > 0)
            waiting.cancel()
        await until(lambda: own_store(worker).rate.bytes_under_way == 0)
        await until(lambda: worker.num_used_blocks == 0)
        store.pool.dram.check_integrity()


async def test_a_request_that_ends_before_its_loads_begin_leaves_no_user(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        message = single(tiny, PROMPT, "short-lived").generation
        async with PrefillRequestScope(worker.async_engine, worker.state, message, restorer=worker.restorer):
            assert own_store(worker).num_users == 1
        assert own_store(worker).num_users == 0


async def test_a_call_that_is_cancelled_while_its_loads_end_leaves_nothing(
    start_worker: Start, tiny: Checkpoint
) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address, link_mbps=0.001)
        believe(worker, SLOW)
        message = single(tiny, PROMPT, "failed").generation
        scope = PrefillRequestScope(worker.async_engine, worker.state, message, restorer=worker.restorer)
        await scope.__aenter__()
        await until(lambda: own_store(worker).rate.bytes_under_way > 0)
        assert worker.num_used_blocks > 0
        leaving = asyncio.create_task(scope.__aexit__(None, None, None))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
        await until(lambda: worker.num_used_blocks == 0)
        assert own_store(worker).num_users == 0


async def test_both_sides_meet_on_a_slow_link(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address, link_mbps=0.1)  # 20 ms a block
        believe(worker, PrefillModel(0.0, 0.0025, 0.0))  # as long as computing it is said to take
        for _ in range(20):
            own_store(worker).rate.observe("dram", 2048, 0.02)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert counted(worker, "restore_decisions", method="both") == 1
        assert first.first_token.num_loaded_tokens < 80


async def test_tenants_load_only_their_own(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        before = await start_worker("prefill", store=address)
        await prefilled(before, single(tiny, PROMPT, "before", tenant_salt=b"one"))
        await before.state.chains.settled()
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        loaded = []
        for salt in (b"", b"two", b"one"):
            (event,) = await prefilled(worker, single(tiny, PROMPT, str(salt), tenant_salt=salt))
            loaded.append(event.first_token.num_loaded_tokens)
        assert loaded == [0, 0, 80]


@pytest.mark.parametrize("kept", list(Tier))
async def test_a_second_turn_finds_the_first_one_whatever_was_lost(
    start_worker: Start, tiny: Checkpoint, kept: Tier, tmp_path: Path
) -> None:
    """The prefill worker was started again (DRAM), the store, too (disk), and its disk was wiped (cold)."""
    tiers: dict[str, Any] = {"disk_dir": tmp_path / "disk", "cold_url": f"file://{tmp_path / 'cold'}"}
    (tmp_path / "cold").mkdir()
    first_turn = [*PROMPT, *reference(tiny, PROMPT, 20)]
    second_turn = [*first_turn, 5, 6, 7]
    expected = reference(tiny, second_turn, 12)
    async with AsyncExitStack() as stores:
        store, address = await stores.enter_async_context(served(**tiers))
        prefill, decode = [await start_worker(role, store=address) for role in ("prefill", "decode")]
        await turn(tiny, prefill, decode, PROMPT, 20)
        await prefill.state.chains.settled()
        await decode.state.chains.settled()
        await store.pool.settled()
        if kept is not Tier.DRAM:
            await stores.aclose()
            if kept is Tier.COLD:
                shutil.rmtree(tmp_path / "disk")
            store, address = await stores.enter_async_context(served(**tiers))
        again = await start_worker("prefill", store=address)
        believe(again, SLOW)
        last = block_id(keys_of(again, first_turn[:-1])[-1])
        await until(lambda: len(store.pool.match([last])) == 1)  # the cold tier is listed
        event, tokens = await turn(tiny, again, decode, second_turn, 12)
        assert tokens == expected
        num_whole = (len(first_turn) - 1) // 8 * 8  # the last token of an answer is never run
        assert event.num_cached_tokens == event.num_loaded_tokens
        assert 0 < event.num_loaded_tokens <= num_whole  # on a busy machine the disk can be slower than the model
        assert counted(again, "store_loaded_bytes", tier=kept.name.lower()) > 0


async def turn(
    tiny: Checkpoint, prefill: RunningWorker, decode: RunningWorker, prompt: list[int], max_tokens: int
) -> tuple[prefill_pb2.FirstToken, list[int]]:
    """The first token's event, and all tokens."""
    wanted = generation(tiny, prompt, max_tokens, f"of-{len(prompt)}")
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(generation=wanted, decode_address=decode.peer.address)
        first, _ = await prefilled(prefill, request)
        tokens = [first.first_token.token.token_id, *await tokens_of(steps, wanted.request_id)]
    return first.first_token, tokens
