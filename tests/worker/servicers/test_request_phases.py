"""What a prefill worker tells of a request's parts: in which order, over which tokens, on one clock."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.pb.prefill_pb2 import FirstToken, Phase, PrefillRequest
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_restorer import PROMPT, SLOW, believe, stored
from tests.worker.test_handover import generation, listening, prefilled, tokens_of

Start = Callable[..., Awaitable[RunningWorker]]


def of_kind(first: FirstToken, kind: Phase.Kind.ValueType) -> list[Phase]:
    return [phase for phase in first.phases if phase.kind == kind]


async def test_every_chunk_is_told_and_the_transfer(start_worker: Start, tiny: Checkpoint) -> None:
    prefill = await start_worker("prefill", max_batch_tokens=33, max_running=4)
    decode = await start_worker("decode")
    async with listening(decode) as steps:
        request = PrefillRequest(generation=generation(tiny, PROMPT, 4), decode_address=decode.peer.address)
        first, done = await prefilled(prefill, request)
        await tokens_of(steps)
    (queue,) = of_kind(first.first_token, Phase.QUEUE)
    chunks = of_kind(first.first_token, Phase.CHUNK)
    transfer = done.handed_over.transfer
    assert [chunk.num_tokens for chunk in chunks] == [33, 33, 17]
    assert not of_kind(first.first_token, Phase.RESTORE)
    times = [0.0, transfer.start_s, queue.start_s, queue.end_s, *(chunk.end_s for chunk in chunks), transfer.end_s]
    assert times == sorted(times)
    assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(chunks))
    assert transfer.num_bytes == done.handed_over.kv_bytes == len(PROMPT) * decode.engine.layout.token_bytes


async def test_a_restore_is_told_with_what_was_planned(start_worker: Start, tiny: Checkpoint) -> None:
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("both", store=address)
        believe(worker, SLOW)
        async with listening(worker) as steps:
            first, kept = await prefilled(worker, PrefillRequest(generation=generation(tiny, PROMPT, 2)))
            await tokens_of(steps)
    (restore,) = of_kind(first.first_token, Phase.RESTORE)
    assert (restore.planned_tokens, restore.num_tokens) == (80, 80)
    assert restore.end_s > restore.start_s >= 0
    assert sum(chunk.num_tokens for chunk in of_kind(first.first_token, Phase.CHUNK)) == len(PROMPT) - 80
    assert not kept.handed_over.HasField("transfer")  # it stays where it is
