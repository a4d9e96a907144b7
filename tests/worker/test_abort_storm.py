"""Hand-overs over one narrow link that end in every way at random moments: what is left afterwards is nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import HalfmoonError
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.pb import decode_pb2, prefill_pb2
from halfmoon.rpc.transport.window import Window
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, until
from tests.worker.test_stalls import nothing_is_left

Start = Callable[..., Awaitable[RunningWorker]]
NUM_REQUESTS = 120
WITH_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")


@pytest.mark.parametrize("transport", ["grpc", "shm", pytest.param("nixl", marks=WITH_NIXL)])
async def test_nothing_is_left(start_worker: Start, tiny: Checkpoint, transport: str) -> None:
    options = {"transports": (transport,), "max_batch_tokens": 64, "num_blocks": 400, "max_running": 32}
    prefill, decode = await start_worker("prefill", **options), await start_worker("decode", **options)
    rng = random.Random(transport)
    with prefill.servicer._channels.to(decode.peer.address) as link:
        link.window = Window(3 * MAX_PAYLOAD_BYTES)

    async def cancel(worker: RunningWorker, name: str) -> None:
        request = decode_pb2.CancelRequest(request_ids=[name])
        await worker.peer.call(worker.decode.Cancel, request, deadline_s=30)

    async def one(number: int) -> bool:
        name, num_turns = f"r{number}", rng.randrange(200)
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, [rng.randrange(3, 128) for _ in range(rng.randrange(3, 250))], 3, name),
            decode_address=decode.peer.address,
        )
        call = asyncio.create_task(prefilled(prefill, request))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        match rng.randrange(4):
            case 0:
                call.cancel()
            case 1:
                await cancel(prefill, name)
            case 2:
                await cancel(decode, name)
        return not isinstance((await asyncio.gather(call, return_exceptions=True))[0], BaseException)

    async with listening(decode):
        handed_over = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
        assert any(handed_over)
        assert not all(handed_over)
        await until(lambda: link.window.free_bytes == link.window.limit_bytes)
        await nothing_is_left(prefill, decode)
        try:
            again = prefill_pb2.PrefillRequest(
                generation=generation(tiny, [5] * 200, 2, "again"), decode_address=decode.peer.address
            )
            assert len(await prefilled(prefill, again)) == 2
        except HalfmoonError as error:
            pytest.fail(f"the link is broken: {error}")
