"""vLLM as far as the engine sees it: steps are told by the test, KV is copied as the connector would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from halfmoon.engine.request import SampledToken, TokenLogprobs
from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.vllm_engine.frontend.token_source import Drawn, Prompt


@dataclass
class BlockStored:
    """An event of vLLM's, as far as it is read."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    extra_keys: list[tuple[Any, ...] | None] | None = None
    lora_name: str | None = None


@dataclass
class BlockRemoved:
    """An event of vLLM's, as far as it is read."""

    block_hashes: list[Any]


class AllBlocksCleared:
    """An event of vLLM's."""


class FakeVllm:
    """Owns the prompts that it was given, and the tokens that the test draws for them."""

    def __init__(self) -> None:
        self.prompts: dict[str, Prompt] = {}
        self.aborted: list[str] = []
        self.num_emptied = 0
        self._queues: dict[str, asyncio.Queue[Drawn | Exception | None]] = {}
        self._arrived = asyncio.Event()
        self.refusal: InvalidRequest | None = None

    async def prompt(self, request_id: str) -> Prompt:
        """Waits for a request."""
        while request_id not in self.prompts:
            self._arrived.clear()
            await self._arrived.wait()
        return self.prompts[request_id]

    def draw(
        self,
        request_id: str,
        *token_ids: int,
        is_failed: bool = False,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Draws tokens in one step."""
        self._queues[request_id].put_nowait(Drawn(tuple(map(SampledToken, token_ids)), is_failed, prompt_logprobs))

    def die(self) -> None:
        """Ends as if its processes had."""
        for queue in self._queues.values():
            queue.put_nowait(Unavailable("vLLM's engine died"))

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Refuses more log-probabilities than vLLM's own default."""
        if (sampling["logprobs"] or 0) > 20:
            raise InvalidRequest("vLLM refuses the request: logprobs", param="logprobs")

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Drawn, None]:
        """Yields what the test draws."""
        if self.refusal is not None:
            raise self.refusal
        self.prompts[prompt.request_id] = prompt
        queue = self._queues[prompt.request_id] = asyncio.Queue()
        self._arrived.set()
        while (drawn := await queue.get()) is not None:
            if isinstance(drawn, Exception):
                raise drawn
            yield drawn

    async def empty_cache(self) -> None:
        """Counts; a real one reports what is gone by events."""
        self.num_emptied += 1

    async def abort(self, request_id: str) -> None:
        """Ends a request."""
        self.aborted.append(request_id)
        self.end(request_id)

    def end(self, request_id: str) -> None:
        """No more tokens come."""
        self._queues[request_id].put_nowait(None)
