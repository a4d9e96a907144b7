"""One request of a modelled worker: what it asks for, what it has, and the tokens that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

State = Literal["new", "waiting", "prefilling", "decoding", "reserved", "held", "removed"]


@dataclass(frozen=True, slots=True)
class ModelledRequest:
    """A request as far as its latency goes."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int  # when it will end
    num_done: int = 0  # of the output, computed before on another worker
    block_keys: tuple[bytes, ...] = ()  # of the prompt's full blocks; none: nothing of it is cached
    priority: int = 0  # smaller goes first
    prefill_only: bool = False  # one token, then its KV is held until `cancel`


class ModelledToken(NamedTuple):
    """One generated token; `position` counts output tokens from 0."""

    request_id: str
    position: int
    is_last: bool


@dataclass(eq=False, slots=True)
class ModelledSequence:
    """`num_tokens` are there, `num_computed` of them have their KV in blocks: all but one of them while decoding."""

    request: ModelledRequest
    rank: tuple[int, int]
    num_tokens: int
    state: State = "new"
    num_computed: int = 0
    num_cached: int = 0
    num_private: int = 0  # blocks
    shared: list[bytes] = field(default_factory=list)  # keys of known blocks, which come before the private ones
    num_named: int = 0  # leading blocks that were offered to the prefix cache, or found there

    @property
    def num_blocks(self) -> int:
        """Private and shared ones."""
        return self.num_private + len(self.shared)

    @property
    def num_output_left(self) -> int:
        """Tokens until it ends."""
        return self.request.num_output_tokens + self.request.num_prompt_tokens - self.num_tokens

    def append(self) -> ModelledToken:
        """It has one token more: this one."""
        self.num_tokens += 1
        request = self.request
        num_output = self.num_tokens - request.num_prompt_tokens
        return ModelledToken(request.request_id, num_output - 1, num_output >= request.num_output_tokens)

    def __lt__(self, other: ModelledSequence) -> bool:
        return self.rank < other.rank
