"""Room on the device for one layer of the sequences whose KV lies on the host, twice: one is used, the other filled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.engine.kv_arena import KVArena
from halfmoon.engine.offload.link import Copy, Fetch, Link
from halfmoon.engine.offload.plan import GroupPlan, Run
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.kv.layout import KVLayout

Task = tuple[int, GroupPlan]  # (layer, whose KV)


class Staging:
    """Owns the two buffers."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device, inputs_size: int | None
    ) -> None:
        num_slots = num_blocks * layout.block_tokens
        shape = (2, layout.num_kv_heads, num_slots, layout.head_dim)
        self.num_blocks = num_blocks
        self.kv = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        self.inputs = [torch.empty(num_slots, inputs_size or 0, dtype=dtype, device=device) for _ in range(2)]


@dataclass(frozen=True, slots=True)
class Staged:
    """One layer of one group's KV, on its way or there. It is good until the next but one is taken."""

    kv: Tensor  # [2, num_kv_heads, staging slots, head_dim]
    inputs: Tensor  # [rows, inputs_size] of the tokens to compute again
    inputs_fetch: Fetch
    kv_fetch: Fetch


class Pipeline:
    """Owns what is under way of one step: while a layer is used, the next one comes (double buffering).

    `tasks` are taken in their order. Inputs come before KV, so that computing with them hides the rest.
    """

    def __init__(self, staging: Staging, link: Link, memory: TieredKV, tasks: Iterator[Task]) -> None:
        self._staging = staging
        self._link = link
        self._memory = memory
        self._tasks = tasks
        self._num_begun = 0
        self._under_way: deque[Staged] = deque()
        self._begin()

    def take(self) -> Staged:
        """The next task's; its fetches may still be waited for."""
        staged = self._under_way.popleft()
        self._begin()  # the buffer of the one before this, which nobody uses any more
        return staged

    def close(self) -> None:
        """Waits for what is under way: nobody writes to the buffers after this."""
        for staged in self._under_way:
            staged.inputs_fetch.wait()
            staged.kv_fetch.wait()
        self._under_way.clear()

    def _begin(self) -> None:
        task = next(self._tasks, None)
        if task is None:
            return
        layer, group = task
        kv, inputs = (buffers[self._num_begun % 2] for buffers in (self._staging.kv, self._staging.inputs))
        self._num_begun += 1
        inputs_fetch = self._link.fetch([self._inputs_copy(layer, run, inputs) for run in group.inputs])
        kv_fetch = self._link.fetch([self._kv_copy(layer, run, kv) for run in group.loads])
        self._under_way.append(Staged(kv, inputs[: group.num_inputs], inputs_fetch, kv_fetch))

    def _inputs_copy(self, layer: int, run: Run, target: Tensor) -> Copy:
        assert self._memory.inputs is not None
        source = self._memory.inputs[layer, run.source : run.source + run.num]
        return Copy(source, target[run.target : run.target + run.num])

    def _kv_copy(self, layer: int, run: Run, target: Tensor) -> Copy:
        arena: KVArena = self._memory.device if run.is_on_device else self._memory.host
        source = arena.tensor[layer, :, :, run.source : run.source + run.num]
        return Copy(source, target[:, :, run.target : run.target + run.num])
