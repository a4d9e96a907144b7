"""What an engine tells of one step: plain values, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from halfmoon.engine.request import TokenOutput


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The leading full blocks of one request whose K and V are in the prefix cache now."""

    request_id: str
    keys: tuple[bytes, ...]
    tenant_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class StagedWork:
    """What a step did for KV that lies on the host. On CUDA, which nobody waits for, the link's figures are 0."""

    num_groups: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # of sequences, by how their KV came to the device (`policy/offload.Kind`)
    link_bytes: int = 0
    link_s: float = 0.0  # that the link was busy
    wait_s: float = 0.0  # of those, that nothing was computed meanwhile


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. `context_tokens` is the sum of the sequences' lengths after it."""

    outputs: tuple[TokenOutput, ...] = ()
    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0  # each of those with the tokens that it attends to
    num_decode_seqs: int = 0
    context_tokens: int = 0
    decode_context_tokens: int = 0  # of those that decode
    num_preempted: int = 0
    duration_s: float = 0.0
    ended_s: float = 0.0  # time.monotonic(): who hears of it may be late
    num_cached_tokens: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # by request that began in this step
    num_computed_tokens: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # of its prompt, by request that had a chunk in this step
    stored_keys: tuple[bytes, ...] = ()  # of blocks that the prefix cache got since the step before
    evicted_keys: tuple[bytes, ...] = ()
    staged: StagedWork = StagedWork()
    chains: tuple[BlockChain, ...] = ()  # of prompts that are computed now, and of outputs that filled a block

    @property
    def is_empty(self) -> bool:
        """Nothing ran: there is no work, or all of it waits for blocks."""
        return not self.num_prefill_tokens and not self.num_decode_seqs
