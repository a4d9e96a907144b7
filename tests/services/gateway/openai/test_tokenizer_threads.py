"""Short bodies never wait for long ones, and nobody tokenizes for a client that left."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from halfmoon.errors import Cancelled, NoCapacity
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.tokenizer_threads import TokenizerThreads
from tests.services.gateway.fakes import PATIENCE_S, ByteTokenizer, served_model, soon

LONG, SHORT = 8 << 20, 7 << 10  # bytes


class Gate:
    """Work that waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def wait(self, model: ServedModel) -> None:
        self._loop.call_soon_threadsafe(self.begun.put_nowait, None)
        assert self.open.wait(PATIENCE_S)


async def test_a_short_body_does_not_wait_for_long_ones() -> None:
    async with TokenizerThreads() as threads:
        gate = Gate()
        long = [asyncio.ensure_future(threads.run(gate.wait, served_model(), LONG)) for _ in range(8)]
        await soon(gate.begun.get())
        assert await soon(threads.run(lambda model: model.tokenizer.encode("a"), served_model(), SHORT)) == [97]
        gate.open.set()
        await soon(asyncio.gather(*long))


async def test_no_more_long_bodies_wait_than_memory_allows() -> None:
    async with TokenizerThreads() as threads:
        gate = Gate()
        long = [asyncio.ensure_future(threads.run(gate.wait, served_model(), LONG)) for _ in range(32)]
        await soon(gate.begun.get())
        with pytest.raises(NoCapacity) as refused:
            await threads.run(gate.wait, served_model(), LONG)
        assert refused.value.retry_after_ms
        gate.open.set()
        await soon(asyncio.gather(*long))
        await soon(threads.run(gate.wait, served_model(), LONG))


async def test_many_prompts_of_a_long_context_may_wait() -> None:
    async with TokenizerThreads() as threads:
        gate = Gate()
        long = [asyncio.ensure_future(threads.run(gate.wait, served_model(), 200_000)) for _ in range(1_000)]
        await soon(gate.begun.get())
        gate.open.set()
        await soon(asyncio.gather(*long))


async def test_work_whose_client_left_ends_before_its_next_text() -> None:
    class Tokenizer(ByteTokenizer):
        num_texts = 0

        def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
            Tokenizer.num_texts += 1
            return super().encode(text)

    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    gate = Gate()

    def slices(model: ServedModel) -> None:
        model.tokenizer.encode("a")
        gate.wait(model)
        try:
            model.tokenizer.encode("b")
        except Cancelled as error:
            gate._loop.call_soon_threadsafe(ended.set_result, error.message)
            raise

    async with TokenizerThreads() as threads:
        running = asyncio.ensure_future(threads.run(slices, replace(served_model(), tokenizer=Tokenizer()), LONG))
        await soon(gate.begun.get())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gate.open.set()
        assert "went away" in await soon(ended)
    assert Tokenizer.num_texts == 1


async def test_work_that_waits_for_its_turn_ends_with_its_client() -> None:
    async with TokenizerThreads() as threads:
        gate = Gate()
        running = [asyncio.ensure_future(threads.run(gate.wait, served_model(), LONG)) for _ in range(2)]
        await soon(gate.begun.get())
        waiting = [asyncio.ensure_future(threads.run(gate.wait, served_model(), LONG)) for _ in range(30)]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        more = [asyncio.ensure_future(threads.run(gate.wait, served_model(), LONG)) for _ in range(30)]
        gate.open.set()
        await soon(asyncio.gather(*running, *more))
