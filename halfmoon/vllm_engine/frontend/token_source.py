"""vLLM as far as the engine needs it: prompts in, tokens out. No vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, Protocol

from halfmoon.engine.request import SampledToken, TokenLogprobs
from halfmoon.vllm_engine.messages import KVOrder


class Drawn(NamedTuple):
    """Tokens of one request that came together. `is_failed`: vLLM ended the request without being asked to."""

    tokens: tuple[SampledToken, ...]
    is_failed: bool = False
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token, where they were asked for


class Prompt(NamedTuple):
    """What vLLM is given of one request."""

    request_id: str
    token_ids: list[int]
    sampling: dict[str, Any]  # arguments of vLLM's SamplingParams
    order: KVOrder
    priority: int
    salt: str  # requests with the same one share vLLM's cached blocks
    adapter: str = ""  # fingerprint of the one to compute with; empty: none


class TokenSource(Protocol):
    """vLLM's `AsyncLLM`, or a test's."""

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Raises InvalidRequest, naming the parameter, for arguments of SamplingParams that vLLM refuses."""

    def generate(self, prompt: Prompt) -> AsyncGenerator[Drawn, None]:
        """Yields the tokens of one request. Raises InvalidRequest before vLLM has it, Unavailable if vLLM died."""

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generator ends, too."""

    async def empty_cache(self) -> None:
        """Empties vLLM's prefix cache. Raises NoCapacity while requests use it: vLLM empties all of it or nothing."""
