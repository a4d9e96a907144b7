"""Answers of requests that have ended, on their way from vLLM's cache into the shared memory, for stores to read."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.step_result import BlockChain
from halfmoon.vllm_engine.messages import Finished, Keep
from halfmoon.vllm_engine.requests.shared_blocks import SharedBlocks


class _Keeping(NamedTuple):
    sequence: Sequence
    first: int
    blocks: list[int]


class KeptAnswers:
    """Owns what is being copied. vLLM keeps a request's pages from `Finished` until it has its `Keep`.

    Room is taken then and not before, for a moment: until a store has read the blocks, or others need the room.
    Event-loop thread only.
    """

    def __init__(self, blocks: SharedBlocks, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._left: dict[int, Sequence] = {}  # by use: requests that have left the engine, and not yet vLLM
        self._keeping: dict[int, _Keeping] = {}  # by use of the new blocks

    def leave(self, use: int, sequence: Sequence) -> None:
        """Notes that a request has left the engine before vLLM reported its end."""
        self._left[use] = sequence

    def place(self, report: Finished, sequence: Sequence | None, use: int) -> Keep | None:
        """Finds room for what the shared memory lacks. sequence: if it is still with the engine; use: a new one."""
        sequence = sequence or self._left.pop(report.use, None)
        if not report.num_tokens:
            return None  # vLLM awaits no answer
        nothing = Keep(report.use, use, 0, ())
        if sequence is None:
            return nothing
        sequence, num_whole = _ended(sequence, report), report.num_tokens // self._block_tokens
        first = self._blocks.num_cached(sequence, num_whole)
        if first >= num_whole or not self._blocks.has_room(num_whole - first):
            return nothing
        blocks = self._blocks.take(use, num_whole - first)
        self._keeping[use] = _Keeping(sequence, first, blocks)
        return Keep(report.use, use, first, tuple(blocks))

    def take_saved(self, use: int) -> BlockChain | None:
        """Makes blocks findable that are copied; returns the chain to which they belong."""
        keeping = self._keeping.pop(use, None)
        if keeping is None:
            return None
        sequence, first, blocks = keeping
        keys = self._blocks.insert_from(sequence, first, blocks)
        request = sequence.request
        return BlockChain(request.request_id, keys, request.tenant_salt, request.owner)


def _ended(sequence: Sequence, report: Finished) -> Sequence:
    """The sequence with the tokens that vLLM has computed: some may still be on their way here."""
    known, request = sequence.token_ids[: report.num_tokens - len(report.answer)], sequence.request
    drawn = (*known, *report.answer)[len(request.prompt_token_ids) :]
    return Sequence(replace(request, output_token_ids=drawn), sequence.order)
