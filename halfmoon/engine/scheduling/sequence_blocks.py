"""The blocks of a worker's sequences: taken, shared with the prefix cache, and given back. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from halfmoon.engine.scheduling.prefix_cache import EVERY_BLOCK, PrefixCache
from halfmoon.engine.scheduling.sequence import KVChoice, Sequence
from halfmoon.kv.kv_policy import num_chosen
from halfmoon.policy.shared_step import ToAdmit

CopyTokens = Callable[[int, int, int], None]
"""Copies K and V of a block's first tokens to another block: (from, to, num_tokens)."""


class SequenceBlocks:
    """Takes blocks of the cache for sequences; those of their ranges `dropped` are given back already."""

    def __init__(
        self,
        cache: PrefixCache,
        block_tokens: int,
        window_tokens: int | None,
        copy_tokens: CopyTokens | None = None,
    ) -> None:
        """window_tokens: see `SchedulerLimits`; without `copy_tokens` only what nobody else needs is gone on from."""
        self._cache = cache
        self._copy_tokens = copy_tokens
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
        return sum(self._cache.num_users(block) == 1 for block in sequence.kept_blocks)

    def num_unused(self, sequence: Sequence, num_known: int, num_tokens: int, reclaimable: Set[int]) -> int:
        """Blocks that `num_tokens` need besides those of the first `num_known` that stay in use anyway."""
        return self.num_for(num_tokens) - self._num_staying(self._cache.found(sequence, num_known), reclaimable)

    def share(self, sequence: Sequence, num_known: int) -> list[int]:
        """Takes references to the cached blocks of the first `num_known` tokens."""
        return self._cache.match(sequence, num_known)

    def give_up(self, shared: list[int]) -> None:
        """Drops references that `share` took."""
        self._cache.release(shared)

    def fill(self, sequence: Sequence, shared: list[int], num_tokens: int, num_known: int = 0) -> None:
        """Gives a sequence `shared` blocks and new ones behind them. There must be enough.

        num_known: up to here it may go on within a block, with what others have of its tokens. A sequence that loads
        blocks loads whole ones.
        """
        num_blocks, num_shared = self.num_for(num_tokens), len(shared)
        begun = None
        if sequence.restore is None and sequence.policy is None:
            begun = self._cache.beginning(sequence, num_shared, num_known)
        if begun is not None and self._cache.give(begun, whole_only=self._copy_tokens is not None):
            shared = [*shared, begun.block]
        elif begun is not None and (self._copy_tokens is None or num_blocks - num_shared > self._cache.num_available):
            self._cache.release([begun.block])
            begun = None
        near = shared[-1] if shared else None
        new = self._cache.allocate(num_blocks - len(shared), near=near, room=self._room(sequence, num_blocks))
        sequence.blocks = shared + new
        sequence.num_known_blocks = num_shared
        sequence.num_cached = num_shared * self._block_tokens + (0 if begun is None else begun.num_tokens)
        if begun is not None and len(shared) == num_shared and self._copy_tokens is not None:
            self._copy_tokens(begun.block, new[0], begun.num_tokens)
            self._cache.release([begun.block])

    def to_admit(self, sequence: Sequence, reclaimable: Set[int] = frozenset()) -> ToAdmit:
        """What a waiting sequence finds in the cache and takes of it when it is admitted."""
        found = self._cache.found(sequence, sequence.num_reusable)
        num_blocks = self.num_for(len(sequence.token_ids)) + self.num_chosen(sequence)
        num_blocks -= self._num_staying(found, reclaimable)
        return ToAdmit(len(found) * self._block_tokens, num_blocks)

    def _num_staying(self, found: Iterable[int], reclaimable: Set[int]) -> int:
        """Cached blocks that others use, besides those that can be reclaimed."""
        return sum(self._cache.num_users(block) > 0 and block not in reclaimable for block in found)

    def num_chosen(self, sequence: Sequence) -> int:
        """Blocks for what its policy will choose of the prompt."""
        return num_chosen(sequence.policy, sequence.num_prompt, self._block_tokens)

    def prepare_choice(self, sequence: Sequence) -> None:
        """Takes these blocks. There must be enough."""
        num_blocks = self.num_chosen(sequence)
        if num_blocks and sequence.policy is not None and sequence.policy.chooser is not None:
            unseen = sequence.policy.unseen(sequence.num_prompt, self._block_tokens)
            sequence.choice = KVChoice(
                self._cache.allocate(num_blocks), unseen.stop * self._block_tokens, sequence.policy.chooser
            )

    def refill(self, sequence: Sequence) -> None:
        """Gives a sequence that was moved out new blocks for what it has computed."""
        num_blocks = self.num_for(sequence.num_computed) - len(sequence.dropped)
        blocks = self._cache.allocate(num_blocks, room=self._room(sequence, num_blocks))
        sequence.blocks = _with_places(blocks, sequence.dropped)

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence one block more."""
        sequence.blocks += self._cache.allocate(1, near=sequence.blocks[-1])

    def leave_gap(self, sequence: Sequence) -> None:
        """Makes places in a filled sequence for the blocks that its policy does not hand over."""
        sequence.dropped = sequence.not_handed_over
        sequence.blocks = _with_places(sequence.blocks, sequence.dropped)

    def drop_unseen(self, sequence: Sequence) -> None:
        """Releases blocks that no token from now on sees; the cache keeps them until others need them.

        A prompt that is handed over keeps those behind the model's window: where it goes, they are asked for.
        """
        if sequence.choice is not None:
            if sequence.effective_policy is not None:
                self._keep_choice(sequence, sequence.choice)
            return
        if sequence.restore is not None or sequence.effective_policy is not sequence.policy:
            return
        window = self._window_tokens
        if sequence.policy is not None:
            unseen = sequence.policy.unseen(sequence.num_computed, self._block_tokens)
        elif window is None or sequence.request.prefill_only:
            return
        else:
            unseen = range(max(0, sequence.num_computed + 1 - window) // self._block_tokens)
        if len(unseen) > len(sequence.dropped):
            with sequence.kv_lock:  # lets a copy in progress finish
                self._cache.release(sequence.blocks[unseen.start + len(sequence.dropped) : unseen.stop])
                sequence.dropped = unseen

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks of a sequence."""
        self._cache.release(sequence.kept_blocks)
        if sequence.choice is not None:
            self._cache.release(sequence.choice.blocks)
        sequence.blocks, sequence.dropped, sequence.choice = [], range(0), None

    def _keep_choice(self, sequence: Sequence, choice: KVChoice) -> None:
        """Gives back the blocks that were chosen from. What follows in the sequence is found by nobody."""
        num_blocks = choice.num_candidates // self._block_tokens
        with sequence.kv_lock:
            self._cache.release(sequence.blocks[:num_blocks])
            sequence.dropped = range(len(choice.blocks), num_blocks)
            sequence.blocks = _with_places(choice.blocks + sequence.blocks[num_blocks:], sequence.dropped)
            sequence.choice, sequence.num_known_blocks = None, EVERY_BLOCK

    def _room(self, sequence: Sequence, num_blocks: int) -> int:
        return max(self.num_for(sequence.max_tokens_ever) - num_blocks, 0)


def _with_places(blocks: list[int], dropped: range) -> list[int]:
    """A sequence's own blocks, with places for those that it has given back."""
    return [*blocks[: dropped.start], *blocks[:1] * len(dropped), *blocks[dropped.start :]]
