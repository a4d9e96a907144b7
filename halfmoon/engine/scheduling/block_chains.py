"""Chains of leading blocks that a step put into the prefix cache, reported for storing. No torch."""

from __future__ import annotations

from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.step_result import BlockChain


class BlockChains:
    """Owns the chains of the step being booked: a prompt's once, then one with each block computed here."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._noted: list[BlockChain] = []

    def note(self, sequence: Sequence, has_new: bool) -> None:
        """Called just before the sequence's next token; `has_new`: the prefix cache just received one of its blocks."""
        is_first = sequence.num_output == len(sequence.request.output_token_ids)
        num_full = sequence.num_computed // self._block_tokens
        is_own = num_full * self._block_tokens > sequence.num_received
        if (is_first or has_new) and is_own and len(sequence.block_keys) >= num_full:
            keys = tuple(sequence.block_keys[:num_full])
            request = sequence.request
            self._noted.append(BlockChain(request.request_id, keys, request.tenant_salt, request.owner))

    def take(self) -> tuple[BlockChain, ...]:
        """The chains noted since the last call."""
        noted, self._noted = self._noted, []
        return tuple(noted)
