"""Which blocks of a prompt's known prefix are brought from elsewhere while the others are computed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

OnProgress = Callable[[int, int], None]  # leading tokens whose K and V are here; how many of them were loaded


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """The first `num_blocks` blocks of a prompt can be had elsewhere; those below `fence` are computed at first.

    `on_progress` hears, on the engine's thread, when the request has its blocks, and of each of its steps.
    """

    num_blocks: int
    fence: int
    on_progress: OnProgress


class Restore:
    """Owns which blocks of one sequence are waited for and which were loaded; every other one is computed.

    Blocks are waited for behind a fence, which can be moved. Changed on the engine's thread alone, under the
    sequence's `kv_lock`.
    """

    def __init__(self, order: RestoreOrder) -> None:
        self.num_blocks = order.num_blocks
        self.fence = order.fence
        self._waited = set(range(order.fence, order.num_blocks))
        self._loaded: set[int] = set()
        self._given_up: set[int] = set()

    def is_waited_for(self, block: int) -> bool:
        """Whether nobody computes this block."""
        return block in self._waited

    def is_loaded(self, block: int) -> bool:
        """Whether computing skips it."""
        return block in self._loaded

    def note_loaded(self, block: int) -> None:
        """Its K and V are in memory. Means nothing for a block that is not waited for any more."""
        if block in self._waited:
            self._waited.remove(block)
            self._loaded.add(block)

    def give_up(self, blocks: Iterable[int]) -> None:
        """These will not be loaded."""
        self._given_up.update(blocks)
        self._waited -= self._given_up

    def move_fence(self, fence: int) -> None:
        """Blocks below it are not waited for; the others are, unless they are here or were given up."""
        self.fence = min(fence, self.num_blocks)
        self._waited = set(range(self.fence, self.num_blocks)) - self._loaded - self._given_up

    def stop(self, block: int) -> int | None:
        """The first block from `block` on that is not to be computed now; None where nothing stops it."""
        return min((one for one in (*self._waited, *self._loaded) if one >= block), default=None)

    def runs(self, block: int) -> tuple[tuple[int, int], ...]:
        """The loaded blocks from `block` on, as half-open runs in their order."""
        found: list[tuple[int, int]] = []
        for one in sorted(one for one in self._loaded if one >= block):
            if found and found[-1][1] == one:
                found[-1] = (found[-1][0], one + 1)
            else:
                found.append((one, one + 1))
        return tuple(found)
