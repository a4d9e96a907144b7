"""Attention of a step some of whose sequences have their KV on the host: theirs is staged, group by group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from halfmoon.engine.attention import store
from halfmoon.engine.attention_backend import StepAttention
from halfmoon.engine.offload.link import Fetch
from halfmoon.engine.offload.staging import Pipeline, Staged
from halfmoon.engine.offload.tiers import TieredKV

# (layer, its inputs [num_tokens, hidden_size]) -> K and V, each [num_tokens, num_kv_heads, head_dim]
KeysValues = Callable[[int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Stores:
    """Rows of a pass, and the slots of one memory that their K, V (and inputs) go to."""

    rows: Tensor  # [num_rows] int64, on the device
    slots: Tensor  # [num_rows] int64, where that memory is


@dataclass(frozen=True, slots=True)
class ColdRows:
    """One group in one forward pass."""

    rows: Tensor  # [num_rows] int64
    attention: StepAttention  # over the staging buffer
    input_slots: Tensor  # [num_inputs] int64, of the staging buffer
    to_device: Stores | None
    to_host: Stores | None


class OffloadedAttention:
    """One forward pass. Counts its layers: a model calls `attend` once a layer, in order.

    `waited_s` and `again_s` are what it has waited for the link and computed again so far, as this thread sees it: on
    CUDA, which computes behind it, they say nothing.
    """

    def __init__(
        self,
        hot: tuple[Tensor, StepAttention] | None,
        groups: tuple[ColdRows, ...],
        pipeline: Pipeline,
        memory: TieredKV,
        keys_values: KeysValues | None,
    ) -> None:
        """hot: rows whose KV is on the device, and their attention. The pipeline brings every group of every layer."""
        self._hot = hot
        self._groups = groups
        self._pipeline = pipeline
        self._memory = memory
        self._keys_values = keys_values
        self._layer = 0
        self.waited_s = 0.0
        self.again_s = 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, scale: float) -> Tensor:
        """As `StepAttention.attend`."""
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if self._hot is not None:
            rows, attention = self._hot
            out[rows] = attention.attend(q[rows], k[rows], v[rows], layer_kv, scale)
        for group in self._groups:
            staged = self._pipeline.take()
            self._complete(group, staged)
            rows = group.rows
            out[rows] = group.attention.attend(q[rows], k[rows], v[rows], staged.kv, scale)
            self._keep(group, k, v, layer_kv)
        self._layer += 1
        return out

    def keep_inputs(self, x: Tensor) -> None:
        """x: [num_tokens, hidden_size], the inputs of the layer that attends next."""
        if self._memory.inputs is None:
            return
        for group in self._groups:
            if group.to_host is not None:
                rows = x[group.to_host.rows].to(self._memory.inputs.device)
                self._memory.inputs[self._layer].index_copy_(0, group.to_host.slots, rows)

    def _complete(self, group: ColdRows, staged: Staged) -> None:
        """K and V of all tokens before the group's rows are in the buffer after this."""
        self._wait(staged.inputs_fetch)
        if not group.input_slots.numel():
            self._wait(staged.kv_fetch)
            return
        assert self._keys_values is not None
        started_s = time.perf_counter()
        k, v = self._keys_values(self._layer, staged.inputs)  # while KV still comes
        self.again_s += time.perf_counter() - started_s
        self._wait(staged.kv_fetch)
        store(k, v, staged.kv, group.input_slots)

    def _wait(self, fetch: Fetch) -> None:
        started_s = time.perf_counter()
        fetch.wait()
        self.waited_s += time.perf_counter() - started_s

    def _keep(self, group: ColdRows, k: Tensor, v: Tensor, layer_kv: Tensor) -> None:
        if group.to_device is not None:
            store(k[group.to_device.rows], v[group.to_device.rows], layer_kv, group.to_device.slots)
        if group.to_host is not None:
            host, rows = self._memory.host.tensor[self._layer], group.to_host.rows
            store(k[rows].to(host.device), v[rows].to(host.device), host, group.to_host.slots)
