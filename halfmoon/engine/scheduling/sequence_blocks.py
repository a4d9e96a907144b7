"""The blocks of a worker's sequences: taken, shared with the prefix cache, and given back. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.sequence import Sequence


class SequenceBlocks:
    """Takes blocks of the cache for sequences. `num_dropped` leading ones of a sequence are given back already."""

    def __init__(self, cache: PrefixCache, block_tokens: int, window_tokens: int | None) -> None:
        """window_tokens: see `SchedulerLimits`."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._window_tokens = window_tokens

    @property
    def num_available(self) -> int:
        """Blocks that nobody needs."""
        return self._cache.num_available

    def num_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_tokens)

    def num_lacking(self, sequence: Sequence, num_more: int = 0) -> int:
        """Blocks that a sequence lacks for its tokens and `num_more`."""
        return max(self.num_for(len(sequence.token_ids) + num_more) - len(sequence.blocks), 0)

    def num_growing(self, running: Iterable[Sequence]) -> int:
        """Blocks that the next tokens of those that decode need."""
        return sum(self.num_lacking(sequence) for sequence in running if sequence.is_decoding)

    def num_freed(self, sequence: Sequence) -> int:
        """Blocks of a sequence that nobody else uses."""
        return sum(self._cache.num_users(block) == 1 for block in sequence.blocks[sequence.num_dropped :])

    def num_unused(self, sequence: Sequence, num_known: int, num_tokens: int, reclaimable: set[int]) -> int:
        """Blocks that `num_tokens` need besides those of the first `num_known` that stay in use anyway."""
        used = self._cache.used(sequence, num_known)
        return self.num_for(num_tokens) - sum(block not in reclaimable for block in used)

    def share(self, sequence: Sequence, num_known: int) -> list[int]:
        """Takes references to the cached blocks of the first `num_known` tokens."""
        return self._cache.match(sequence, num_known)

    def give_up(self, shared: list[int]) -> None:
        """Drops references that `share` took."""
        self._cache.release(shared)

    def fill(self, sequence: Sequence, shared: list[int], num_tokens: int) -> None:
        """Gives a sequence `shared` blocks and new ones behind them. There must be enough."""
        num_blocks = self.num_for(num_tokens)
        near = shared[-1] if shared else None
        new = self._cache.allocate(num_blocks - len(shared), near=near, room=self._room(sequence, num_blocks))
        sequence.blocks = shared + new
        sequence.num_known_blocks = len(shared)
        sequence.num_cached = len(shared) * self._block_tokens

    def refill(self, sequence: Sequence) -> None:
        """Gives a sequence that was moved out new blocks for what it has computed."""
        num_blocks = self.num_for(sequence.num_computed) - sequence.num_dropped
        blocks = self._cache.allocate(num_blocks, room=self._room(sequence, num_blocks))
        sequence.blocks = blocks[:1] * sequence.num_dropped + blocks

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence one block more."""
        sequence.blocks += self._cache.allocate(1, near=sequence.blocks[-1])

    def drop_behind_window(self, sequence: Sequence) -> None:
        """Releases leading blocks that no token from now on sees; the cache keeps them until others need them.

        A prompt that is handed over keeps its blocks: where it goes, they are asked for by position.
        """
        window = self._window_tokens
        if window is None or sequence.request.prefill_only or sequence.restore is not None:
            return
        num_unseen = max(0, sequence.num_computed + 1 - window) // self._block_tokens
        if num_unseen > sequence.num_dropped:
            self._cache.release(sequence.blocks[sequence.num_dropped : num_unseen])
            sequence.num_dropped = num_unseen

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks of a sequence."""
        self._cache.release(sequence.blocks[sequence.num_dropped :])
        sequence.blocks, sequence.num_dropped = [], 0

    def _room(self, sequence: Sequence, num_blocks: int) -> int:
        return max(self.num_for(sequence.max_tokens_ever) - num_blocks, 0)
