"""Two buffers on the device for one layer of sequences with KV on the host: one is used while the other fills."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.engine.config import OffloadOverlap
from halfmoon.engine.offload.link import Copy, Fetch, Link
from halfmoon.engine.offload.plan import GroupPlan, Load
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.kv.kv_layout import KVLayout

Task = tuple[int, GroupPlan]  # (layer, whose KV)


class Staging:
    """Owns the two buffers."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device, has_inputs: bool
    ) -> None:
        num_slots = num_blocks * layout.block_tokens
        shape = (layout.num_kv_heads, num_slots, layout.head_dim)
        self.num_blocks = num_blocks
        self.kv = [torch.empty(2, *shape, dtype=dtype, device=device) for _ in range(2)]
        inputs_shape = shape if has_inputs else (0, 0, 0)
        self.inputs = [torch.empty(inputs_shape, dtype=dtype, device=device) for _ in range(2)]


@dataclass(frozen=True, slots=True)
class Staged:
    """One layer of one group's KV, in progress or complete. Valid until the next but one is taken."""

    kv: Tensor  # [2, num_kv_heads, staging slots, head_dim]
    inputs: Tensor  # [num_kv_heads, tokens to compute, head_dim]
    inputs_fetch: Fetch | None  # None: nothing to fetch
    kv_fetch: Fetch | None


class Pipeline:
    """Owns the fetches in progress of one step: while a layer is used, the next one is fetched (double buffering).

    `tasks` are taken in order. Inputs come before KV, so that computing with them hides the rest. With less `overlap`
    a task's fetches begin when it is taken, and without any they have ended then.
    """

    def __init__(
        self, staging: Staging, link: Link, memory: TieredKV, tasks: Iterator[Task], overlap: OffloadOverlap
    ) -> None:
        self._staging = staging
        self._link = link
        self._memory = memory
        self._tasks = tasks
        self._num_begun = 0
        self._under_way: deque[Staged] = deque()
        self._overlap = overlap
        if overlap == "layers":
            self._begin()

    def take(self) -> Staged:
        """The buffer of the next task; its fetches may still be in progress."""
        self._begin()  # in the buffer of the task before this one, which is no longer used; or of this one
        staged = self._under_way.popleft()
        if self._overlap == "none":
            self._wait(staged)
        return staged

    def close(self) -> None:
        """Waits for fetches in progress: nothing writes to the buffers after this."""
        for staged in self._under_way:
            self._wait(staged)
        self._under_way.clear()

    def _wait(self, staged: Staged) -> None:
        for fetch in (staged.inputs_fetch, staged.kv_fetch):
            if fetch is not None:
                fetch.wait()

    def _begin(self) -> None:
        task = next(self._tasks, None)
        if task is None:
            return
        layer, group = task
        kv, inputs = (buffers[self._num_begun % 2] for buffers in (self._staging.kv, self._staging.inputs))
        self._num_begun += 1
        inputs_fetch = self._fetch([self._inputs_copy(layer, load, inputs) for load in group.inputs])
        kv_fetch = self._fetch([copy for load in group.loads for copy in self._kv_copies(layer, load, kv)])
        self._under_way.append(Staged(kv, inputs[:, : len(group.input_slots)], inputs_fetch, kv_fetch))

    def _fetch(self, copies: list[Copy]) -> Fetch | None:
        return self._link.fetch(copies) if copies else None

    def _inputs_copy(self, layer: int, load: Load, target: Tensor) -> Copy:
        run = load.run
        source = self._memory.host[layer, :, run.first : run.first + run.num_tokens]
        return Copy(source, target[:, load.target : load.target + run.num_tokens])

    def _kv_copies(self, layer: int, load: Load, target: Tensor) -> Iterator[Copy]:
        run = load.run
        for plane, slot in enumerate((run.first, run.second)):
            memory = self._memory.device.tensor[:, plane] if run.content == "device" else self._memory.host
            source = memory[layer, :, slot : slot + run.num_tokens]
            yield Copy(source, target[plane, :, load.target : load.target + run.num_tokens])
