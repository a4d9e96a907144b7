"""Five hundred hand-overs at once, over two workers of each half: all of them end, with the right tokens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.pb import prefill_pb2, types_pb2
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, reference, until

Start = Callable[..., Awaitable[RunningWorker]]
NUM_REQUESTS = 500
MAX_TOKENS = 4
PROMPTS = [[(n * 31 + i) % 120 + 3 for i in range(3 + 7 * n)] for n in range(10)]


async def collect(steps: AsyncIterator[Any], num_requests: int, found: dict[str, list[int]]) -> None:
    """Tokens by request until so many requests have ended."""
    while num_requests:
        for token in (await anext(steps)).tokens:
            found[token.request_id].append(token.token_id)
            num_requests -= token.finish_reason != types_pb2.NOT_FINISHED


async def test_five_hundred_at_once(start_worker: Start, tiny: Checkpoint) -> None:
    options = {"num_blocks": 3000, "max_running": 512, "max_batch_tokens": 1024}
    prefills = [await start_worker("prefill", **options) for _ in range(2)]
    decodes = [await start_worker("decode", **options) for _ in range(2)]
    firsts: dict[str, int] = {}
    rest: dict[str, list[int]] = defaultdict(list)

    async def one(number: int) -> None:
        name, prompt = f"r{number}", PROMPTS[number % len(PROMPTS)]
        prefill, decode = prefills[number % 2], decodes[number // 2 % 2]
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, prompt, MAX_TOKENS, name), decode_address=decode.peer.address
        )
        first, _ = await prefilled(prefill, request)
        firsts[name] = first.first_token.token.token_id

    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(listening(decode)) for decode in decodes]
        collecting = [collect(steps, NUM_REQUESTS // 2, rest) for steps in streams]
        await asyncio.gather(*collecting, *(one(number) for number in range(NUM_REQUESTS)))
    expected = [reference(tiny, prompt, MAX_TOKENS) for prompt in PROMPTS]
    for number in range(NUM_REQUESTS):
        name = f"r{number}"
        assert [firsts[name], *rest[name]] == expected[number % len(PROMPTS)]
    await until(lambda: not any(worker.num_used_blocks for worker in (*prefills, *decodes)))
