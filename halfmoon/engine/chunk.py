"""What a forward pass needs to know of one sequence: plain values that can travel to other ranks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.engine.scheduling.schedule import ScheduledSequence
from halfmoon.engine.scheduling.sequence import KVChoice
from halfmoon.kv.kv_policy import KVPolicy


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that run in one step; a decode is a chunk of one."""

    token_ids: Sequence[int]
    start: int  # position of the first one
    blocks: Sequence[int]  # all blocks of the sequence
    num_logits: int  # how many of the last tokens' logits are needed
    policy: KVPolicy | None = None  # what its tokens see; None: all before them
    choice: KVChoice | None = None  # what is chosen behind these tokens, the last of a prompt

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


def chunk_of(item: ScheduledSequence) -> Chunk:
    """The chunk for a scheduled sequence."""
    sequence, start = item.sequence, item.start
    token_ids = [*sequence.token_ids[start : start + item.num_tokens - len(item.drafts)], *item.drafts]
    choice = sequence.choice if start + len(token_ids) == sequence.num_prompt else None
    return Chunk(token_ids, start, sequence.blocks, item.num_logits, sequence.effective_policy, choice)
