"""Which blocks of a prompt's known prefix are loaded from elsewhere while the others are computed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from halfmoon.engine.scheduling.layer_gate import LayerGate

OnProgress = Callable[[int, int], None]  # (leading tokens whose K and V are here, how many of them were loaded)


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """The first `num_blocks` blocks of a prompt are available elsewhere; those below `fence` are computed at first.

    `on_progress` is called, on the engine's thread, when the request has its blocks and after each of its steps.
    """

    num_blocks: int
    fence: int
    on_progress: OnProgress
    segments: tuple[range, ...] = ()  # blocks behind the fence that are computed here: of a prompt shared by workers
    layers_at_once: int = 0  # of a shared prompt: layers after which the request's listener is notified; 0: not shared


class Restore:
    """Owns which blocks of one sequence are awaited and which were loaded; all others are computed.

    Blocks are awaited behind a fence, which can be moved. Changed only on the engine's thread, under the sequence's
    `kv_lock`.
    """

    def __init__(self, order: RestoreOrder) -> None:
        self.num_blocks = order.num_blocks
        self.fence = order.fence
        self.gate: LayerGate | None = None  # where a step can wait for what is awaited
        self.is_shared = order.layers_at_once > 0  # what is computed here was decided by others, who wait for it
        self._loaded: set[int] = set()
        self._given_up = {block for segment in order.segments for block in segment}
        self._waited = set(range(order.fence, order.num_blocks)) - self._given_up

    @property
    def is_waiting(self) -> bool:
        """Whether any block is awaited."""
        return bool(self._waited)

    def is_waited_for(self, block: int) -> bool:
        """Whether this block is awaited, and so not computed."""
        return block in self._waited

    def is_loaded(self, block: int) -> bool:
        """Whether computing skips it."""
        return block in self._loaded

    def note_loaded(self, block: int) -> None:
        """Notes that a block's K and V are in memory. No effect on a block that is no longer awaited."""
        if block in self._waited:
            self._waited.remove(block)
            self._loaded.add(block)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Notes that these blocks will not be loaded."""
        self._given_up.update(blocks)
        self._waited -= self._given_up

    def move_fence(self, fence: int) -> None:
        """Awaits the blocks behind the fence, unless they are loaded or were given up; blocks below it are computed."""
        self.fence = min(fence, self.num_blocks)
        self._waited = set(range(self.fence, self.num_blocks)) - self._loaded - self._given_up

    def stop(self, block: int) -> int | None:
        """The first block from `block` on that must not be computed now; None if there is none."""
        return min((other for other in (*self._waited, *self._loaded) if other >= block), default=None)

    def arriving_end(self, block: int) -> int:
        """The first block from `block` on that is neither loaded nor arrives by layer while a step waits at the gate.

        Equal to `block` if no step can begin behind what arrives. Only that of a shared prompt begins before all that
        is awaited arrives.
        """
        gate = self.gate
        if gate is None or not gate.is_open:
            return block
        here, end = self._loaded | (self._waited & gate.blocks), block
        while end in here:
            end += 1
        return block if end in self._waited or (end < self.num_blocks and not self.is_shared) else end

    def runs(self, block: int) -> tuple[tuple[int, int], ...]:
        """The loaded blocks from `block` on, as half-open runs in order."""
        runs: list[tuple[int, int]] = []
        for loaded in sorted(other for other in self._loaded if other >= block):
            if runs and runs[-1][1] == loaded:
                runs[-1] = (runs[-1][0], loaded + 1)
            else:
                runs.append((loaded, loaded + 1))
        return tuple(runs)
