"""What an engine reports after one step: plain values, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from halfmoon.engine.request import TokenOutput
from halfmoon.kv.owner import SHARED, KVOwner


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The leading full blocks of one request whose K and V are now in the prefix cache."""

    request_id: str
    keys: tuple[bytes, ...]
    tenant_salt: bytes = b""
    owner: KVOwner = SHARED


@dataclass(frozen=True, slots=True)
class StagedWork:
    """What a step did for KV and weights on the host. On CUDA, which is never waited for, the link's figures are 0."""

    num_groups: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # sequences, by how their KV came to the device (`policy/offload/recompute.py`)
    link_bytes: int = 0
    link_s: float = 0.0  # while the link was busy
    wait_s: float = 0.0  # part of it during which nothing was computed
    weight_bytes: int = 0
    weight_wait_s: float = 0.0  # until a layer's weights were there


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    outputs: tuple[TokenOutput, ...] = ()
    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0  # pairs of such a token and a token that it attends to
    num_decode_seqs: int = 0
    decode_context_tokens: int = 0  # that the decoding sequences see, their newest included
    num_drafts: int = 0  # guessed tokens that ran behind those of the decoding sequences
    num_right_drafts: int = 0  # of these, how many were what was drawn
    num_spread_tokens: int = 0  # tokens of a step for which sequence ranks exchanged keys or queries
    is_nested: bool = False  # ran in the middle of another one
    num_preempted: int = 0
    num_paused: int = 0  # pauses begun since the step before
    num_moved_out: int = 0  # paused sequences that gave their blocks to others
    paused_s: float = 0.0  # of pauses that ended
    duration_s: float = 0.0
    interrupted_s: float = 0.0  # besides, while nested steps and commands ran in the middle of it
    layer_wait_s: float = 0.0  # part of the duration during which the step waited for KV that arrives by layer
    ended_s: float = 0.0  # time.monotonic(): listeners may be late
    num_cached_tokens: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # by request that began in this step
    num_computed_tokens: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # prompt tokens, by request that had a chunk in this step
    stored_keys: tuple[bytes, ...] = ()  # of blocks that entered the prefix cache since the step before
    evicted_keys: tuple[bytes, ...] = ()
    staged: StagedWork = StagedWork()
    chains: tuple[BlockChain, ...] = ()  # chains of prompts computed in this step, and of outputs that filled a block

    @property
    def began_s(self) -> float:
        """When it began, by time.monotonic()."""
        return self.ended_s - self.duration_s - self.interrupted_s

    @property
    def num_decode_rows(self) -> int:
        """Tokens of decoding sequences, guesses included: what the step's time depends on."""
        return self.num_decode_seqs + self.num_drafts

    @property
    def is_empty(self) -> bool:
        """Whether nothing ran: there was no work, or all of it waits for blocks."""
        return not self.num_prefill_tokens and not self.num_decode_seqs
