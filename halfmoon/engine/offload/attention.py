"""Attention of a step in which some sequences have their KV on the host: it is staged group by group."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from halfmoon.engine.attention.attention import store
from halfmoon.engine.attention.attention_backend import AttentionRule, StepAttention
from halfmoon.engine.offload.link import Fetch
from halfmoon.engine.offload.staging import Pipeline, Staged
from halfmoon.engine.offload.tiers import Content, TieredKV, as_rows


@dataclass(frozen=True, slots=True)
class Stores:
    """Rows of a pass, and the slots of one memory where their K and V, or their inputs, are stored."""

    content: Content
    rows: Tensor  # [num_rows] int64, on the device
    firsts: Tensor  # [num_rows] int64, on that memory's device
    seconds: Tensor  # [num_rows] int64


@dataclass(frozen=True, slots=True)
class Replacement:
    """A block's new content, gathered layer by layer on the host.

    `first` is its first row, or the first of the computed inputs.
    """

    block: int
    first: int
    content: Tensor  # [layers, block_tokens, hidden_size] or [layers, 2, kv_heads, block_tokens, head_dim]


@dataclass(frozen=True, slots=True)
class ColdRows:
    """One group in one forward pass."""

    rows: Tensor  # [num_rows] int64
    attention: StepAttention  # over the staging buffer
    input_slots: Tensor  # [num_inputs] int64, of the staging buffer
    stores: tuple[Stores, ...]
    to_inputs: tuple[Replacement, ...]
    to_kv: tuple[Replacement, ...]


@dataclass(slots=True)
class PassTimes:
    """Time of a pass from the end of the first layer's attention to that of the last, as seen by this thread.

    Meaningless on CUDA, which computes asynchronously.
    """

    all_s: float = 0.0
    waited_s: float = 0.0  # for the link
    inputs_s: float = 0.0  # for computing K and V from inputs

    @property
    def base_s(self) -> float:
        """Time of what is computed in any case."""
        return self.all_s - self.waited_s - self.inputs_s


class OffloadedAttention:
    """The attention of one forward pass. Counts its layers: a model calls `attend` once a layer, in order."""

    def __init__(
        self,
        hot: tuple[Tensor, StepAttention] | None,
        groups: tuple[ColdRows, ...],
        pipeline: Pipeline,
        memory: TieredKV,
    ) -> None:
        """hot: rows whose KV is on the device, and their attention. The pipeline fetches every group of every layer."""
        self._hot = hot
        self._groups = groups
        self._pipeline = pipeline
        self._memory = memory
        self._layer = 0
        self._first_s = 0.0
        self.times = PassTimes()
        self.waited_s = 0.0  # for the link, in all layers

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`."""
        out = q.new_empty(q.shape[0], q.shape[1] * rule.out_size(q.shape[2]))
        if self._hot is not None:
            rows, attention = self._hot
            out[rows] = attention.attend(q[rows], k[rows], v[rows], layer_kv, rule)
        for group in self._groups:
            staged = self._pipeline.take()
            self._complete(group, staged)
            rows = group.rows
            out[rows] = group.attention.attend(q[rows], k[rows], v[rows], staged.kv, rule)
            self._keep(group, k, v, layer_kv)
        self._note_time()
        self._layer += 1
        return out

    def keep_inputs(self, x: Tensor) -> None:
        """Keeps x: [num_tokens, hidden_size], the inputs of the layer that attends next."""
        host = self._memory.host[self._layer]  # [kv_heads, slots, head_dim]
        for group in self._groups:
            for stores in group.stores:
                if stores.content == "inputs":
                    cells = x[stores.rows].to(host.device).view(len(stores.firsts), -1, host.shape[-1])
                    host.index_copy_(1, stores.firsts, cells.transpose(0, 1))
            for replaced in group.to_inputs:
                content = replaced.content[self._layer]
                content.copy_(x[replaced.first : replaced.first + len(content)], non_blocking=True)

    def _complete(self, group: ColdRows, staged: Staged) -> None:
        """Completes the buffer with K and V of all tokens before the group's rows."""
        if not group.input_slots.numel():
            self._wait(staged.kv_fetch)
            return
        self._wait(staged.inputs_fetch)
        assert self._memory.keys_values is not None
        started_s = time.perf_counter()
        k, v = self._memory.keys_values(self._layer, as_rows(staged.inputs))  # while KV is still being fetched
        store(k, v, staged.kv, group.input_slots)
        for replaced in group.to_kv:
            for plane, values in zip(replaced.content[self._layer], (k, v), strict=True):
                first, last = replaced.first, replaced.first + plane.shape[1]
                plane.copy_(values[first:last].transpose(0, 1), non_blocking=True)
        self.times.inputs_s += time.perf_counter() - started_s
        self._wait(staged.kv_fetch)

    def _wait(self, fetch: Fetch | None) -> None:
        if fetch is not None:
            started_s = time.perf_counter()
            fetch.wait()
            waited_s = time.perf_counter() - started_s
            self.times.waited_s += waited_s
            self.waited_s += waited_s

    def _keep(self, group: ColdRows, k: Tensor, v: Tensor, layer_kv: Tensor) -> None:
        host = self._memory.host[self._layer]
        for stores in group.stores:
            rows = stores.rows
            if stores.content == "device":
                store(k[rows], v[rows], layer_kv, stores.firsts)
            elif stores.content == "kv":
                for values, slots in ((k, stores.firsts), (v, stores.seconds)):
                    host.index_copy_(1, slots, values[rows].to(host.device).transpose(0, 1))

    def _note_time(self) -> None:
        now_s = time.perf_counter()
        if self._layer == 0:
            self._first_s = now_s
            self.times = PassTimes()
        self.times.all_s = now_s - self._first_s
