"""Which leading blocks of requests a step put into the prefix cache, for who stores them. No torch."""

from __future__ import annotations

from halfmoon.engine.sequence import Sequence
from halfmoon.engine.step_result import BlockChain


class BlockChains:
    """Owns the chains of the step that is being booked: of a prompt once, then with each block computed here."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._noted: list[BlockChain] = []

    def note(self, sequence: Sequence, has_new: bool) -> None:
        """The sequence's next token is about to come; `has_new`: the prefix cache just got a block of it."""
        is_first = sequence.num_output == len(sequence.request.output_token_ids)
        num_full = sequence.num_computed // self._block_tokens
        is_own = num_full * self._block_tokens > sequence.num_received
        if (is_first or has_new) and is_own and len(sequence.block_keys) >= num_full:
            keys = tuple(sequence.block_keys[:num_full])
            self._noted.append(BlockChain(sequence.request_id, keys, sequence.request.tenant_salt))

    def take(self) -> tuple[BlockChain, ...]:
        """Those since the last call."""
        noted, self._noted = self._noted, []
        return tuple(noted)
