"""The connector beside the model: copies KV between vLLM's paged cache and the shared memory, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index

from halfmoon.errors import Incompatible
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.vllm_engine.connector.paged_layer import PagedLayer, WriteTokens
from halfmoon.vllm_engine.connector.scheduling_half import Copy, StepOrders
from halfmoon.vllm_engine.messages import Ended, Saved
from halfmoon.vllm_engine.reports import ReportSender
from halfmoon.vllm_engine.staging import StagingMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ComputingHalf:
    """Owns the view of this process's part of the paged cache."""

    def __init__(self, memory: StagingMemory, reports: ReportSender, config: VllmConfig) -> None:
        self._memory = memory
        self._reports = reports
        self._config = config
        self._rank = config.parallel_config.rank
        self._layers: dict[str, tuple[int, int, PagedLayer]] = {}  # name: (place here, layer of the model, cache)
        self._heads = slice(0, memory.layout.num_kv_heads)
        self._failed: set[int] = set()
        self._foreign: set[int] = set()  # uses that were found ended while their request was not
        self._released: set[str] = set()  # vLLM's ids of ended requests that need their pages no more

    def register(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Learns how each layer of the cache lies in memory. Raises Incompatible."""
        layout = self._memory.layout
        tensor_parallel = self._config.parallel_config.tensor_parallel_size
        num_heads = max(1, layout.num_kv_heads // tensor_parallel)
        first = get_tensor_model_parallel_rank() * layout.num_kv_heads // tensor_parallel
        self._heads = slice(first, first + num_heads)
        names = sorted(kv_caches, key=extract_layer_index)
        if [extract_layer_index(name) for name in names] != list(range(layout.num_layers)):
            raise Incompatible(f"vLLM keeps KV of {names}, not once for each of the model's {layout.num_layers} layers")
        modules = self._config.compilation_config.static_forward_context
        for name in names:
            module = modules[name]
            write = _latent_write(module) if self._config.model_config.use_mla else _write(module)
            layer = PagedLayer.probed(kv_caches[name], num_heads, layout.block_tokens, layout.head_dim, write)
            self._layers[name] = (len(self._layers), extract_layer_index(name), layer)

    def begin(self, orders: StepOrders) -> None:
        """Loads what the step needs, saves what earlier ones computed, and reports requests whose blocks are left."""
        for copy in orders.loads:
            blocks = copy.order.blocks
            for _, index, layer in self._layers.values():
                values = self._memory.read(index, self._heads, blocks, copy.start, copy.end)
                layer.write(copy.pages, copy.start, values)
            if not self._memory.has_stamps(blocks, copy.order.use):
                self._foreign.add(copy.order.use)
                size = self._memory.layout.block_tokens
                self._failed.update(copy.pages[copy.start // size : -(-copy.end // size)])
        for copy in orders.late_saves:
            for _, index, layer in self._layers.values():
                self._copy(copy, index, layer)
            self._reports.send(Saved(copy.order.request_id, copy.end, copy.end, len(self._layers), self._rank))
        self._released.update(orders.released)
        self._reports.send(*(Ended(order.request_id, order.use, self._rank) for order in orders.ended))

    def save(self, name: str, orders: StepOrders) -> None:
        """Copies one layer of the step's tokens to the arena."""
        place, index, layer = self._layers[name]
        for copy in orders.saves:
            if copy.order.use in self._foreign:
                continue
            self._copy(copy, index, layer)
            is_last = place + 1 == len(self._layers)
            if is_last or (place + 1) % self._report_every(copy.end - copy.start) == 0:
                whole = copy.end if is_last else copy.start
                self._reports.send(Saved(copy.order.request_id, whole, copy.end, place + 1, self._rank))

    def take_failed(self) -> set[int]:
        """Pages whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_released(self) -> set[str]:
        """Requests whose pages vLLM may free, since the last call."""
        released, self._released = self._released, set()
        return released

    def _copy(self, copy: Copy, index: int, layer: PagedLayer) -> None:
        values = layer.read(copy.pages, copy.start, copy.end - copy.start)
        self._memory.write(index, self._heads, copy.order.blocks, copy.start, values)

    def _report_every(self, num_tokens: int) -> int:
        """Layers that fill a frame."""
        return max(1, MAX_PAYLOAD_BYTES // (self._memory.layout.token_layer_bytes * num_tokens))


def _write(module: Any) -> WriteTokens:
    """The write of one layer of vLLM's."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        module.impl.do_kv_cache_update(module, keys, values, module.kv_cache, slots)

    return write


def _latent_write(module: Any) -> WriteTokens:
    """The write of one layer with latent attention: what we call keys and values are the halves of each row."""
    rank = module.impl.kv_lora_rank

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        rows = torch.cat([keys, values], dim=-1).squeeze(1)  # [tokens, latent and rotary values]
        rotary = rows[:, rank:].unsqueeze(1)
        module.impl.do_kv_cache_update(rows[:, :rank], rotary, module.kv_cache, slots, "auto", module._k_scale)

    return write
