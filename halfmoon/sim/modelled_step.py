"""One step of a modelled engine: what runs in it, and what it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.sim.modelled_sequence import ModelledSequence, ModelledToken


class Chunk(NamedTuple):
    """Prompt tokens of one sequence in a step."""

    sequence: ModelledSequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What runs now, and how long it takes. To be given back to `end_step` then."""

    seconds: float
    decodes: tuple[ModelledSequence, ...]
    chunks: tuple[Chunk, ...]
    num_preempted: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did."""

    seconds: float
    tokens: list[ModelledToken]
    num_prefill_tokens: int
    num_prefill_pairs: float  # each of those with the tokens that it attends to
    num_decodes: int
    context_tokens: int  # of its sequences, after it
    decode_context_tokens: int  # of those that decoded, before it
    num_preempted: int
    began: dict[str, int]  # requests of which the first tokens were computed: how many were cached
    computed: dict[str, int]  # prompts of which something was computed: tokens whose KV is there now
    chunks: dict[str, int]  # tokens of theirs that this step computed
    stored: tuple[bytes, ...]  # keys that the prefix cache knows now
    evicted: tuple[bytes, ...]  # and does not know any more
