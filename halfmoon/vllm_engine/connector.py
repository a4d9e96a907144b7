"""The part of us that runs inside vLLM: copies KV between its paged cache and the shared arena. See the room's text.

vLLM imports it by name. Each process has one of the two halves.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index

from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.vllm_engine.messages import Ended, KVOrder, Report, Saved, Stepped, encode_report
from halfmoon.vllm_engine.paged_layer import PagedLayer, WriteTokens
from halfmoon.vllm_engine.staging import StagingMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens `start`..`end` of one request, in vLLM's blocks and in those of the arena."""

    order: KVOrder
    pages: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepOrders(KVConnectorMetadata):
    """What the computing halves do around one step."""

    loads: tuple[Copy, ...] = ()
    saves: tuple[Copy, ...] = ()
    ended: tuple[KVOrder, ...] = ()


@dataclass(slots=True)
class _Followed:
    """A request with an order, as vLLM's scheduler has it."""

    order: KVOrder
    pages: list[int] = field(default_factory=list)
    num_loading: int = 0  # tokens to be loaded before its next step
    saved: int = 0  # tokens below this one are in the arena
    has_ended: bool = False  # nothing is left to be copied


class HalfmoonConnector(KVConnectorBase_V1):
    """vLLM's interface over the half that this process has."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        reports = Reports(extra["reports"])
        self._scheduling, self._computing = None, None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduling = SchedulingHalf(reports)
        else:
            layout = KVLayout(**extra["layout"])
            memory = StagingMemory(layout, extra["num_blocks"], extra["memory"])
            self._computing = ComputingHalf(memory, reports, vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a saved layer is ours when its step ends, so a preemption takes nothing back."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: layers are copied by Python code between the graphs."""
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduling.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduling.num_loadable(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduling.note_load(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        return self.scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduling.end_step()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduling.finish(request)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.computing.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.computing.begin(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are complete when a step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        self.computing.save(layer_name, self._orders())

    def wait_for_save(self) -> None:
        """Does nothing: saves are complete when `save_kv_layer` returns."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.computing.take_failed()

    @property
    def scheduling(self) -> SchedulingHalf:
        """This process's half, beside the scheduler."""
        assert self._scheduling is not None
        return self._scheduling

    @property
    def computing(self) -> ComputingHalf:
        """This process's half, beside the model."""
        assert self._computing is not None
        return self._computing

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders


class Reports:
    """Sends reports to the worker process. Its end is the end of this process, too."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        threading.Thread(target=self._end_with_worker, name="worker-watch", daemon=True).start()

    def send(self, *reports: Report) -> None:
        """Waits only while the worker is far behind. Raises OSError if it is gone."""
        if reports:
            self._socket.sendall(b"".join(map(encode_report, reports)))

    def _end_with_worker(self) -> None:
        """Waits for the worker's end, however it went. Nobody could use this process, nor its memory, after that."""
        with suppress(OSError):
            self._socket.recv(1)
        os._exit(1)


class SchedulingHalf:
    """Owns which pages of vLLM's belong to requests with orders."""

    def __init__(self, reports: Reports) -> None:
        self.pool: BlockPool | None = None
        self._reports = reports
        self._followed: dict[str, _Followed] = {}  # by vLLM's request id
        self._ended: list[KVOrder] = []
        self._steps: deque[Stepped] = deque()

    def num_loadable(self, request: Request, num_computed: int) -> int:
        """How many tokens behind the `num_computed` the arena has.

        A preempted request's KV is computed again, and so is everything if vLLM has evicted what was left out of the
        hand-over.
        """
        order = KVOrder.of(request.kv_transfer_params)
        if order is None or request.num_preemptions or num_computed < order.load_from:
            return 0
        num_loadable: int = min(order.load_tokens, request.num_tokens - 1) - num_computed
        return max(0, num_loadable)

    def note_load(self, request: Request, num_tokens: int) -> None:
        """Notes that vLLM has pages for this many tokens of the arena."""
        order = KVOrder.of(request.kv_transfer_params)
        if order is not None:
            followed = self._followed.setdefault(request.request_id, _Followed(order))
            followed.num_loading = num_tokens

    def step(self, output: SchedulerOutput) -> StepOrders:
        """The copies that belong to this step."""
        cached = output.scheduled_cached_reqs
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            if new.req_id in self._followed:
                self._followed[new.req_id].pages = list(new.block_ids[0])
        for request_id, pages, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[request_id] = start
            followed = self._followed.get(request_id)
            if followed is not None and request_id in cached.resumed_req_ids:
                followed.pages = []
            if followed is not None and pages is not None:
                followed.pages += pages[0]
        loads, saves = [], []
        for request_id, start in starts.items():
            followed = self._followed.get(request_id)
            if followed is None:
                continue
            order, pages_now = followed.order, tuple(followed.pages)
            if followed.num_loading:
                loads.append(Copy(order, pages_now, start - followed.num_loading, start))
                followed.num_loading = 0
            end = start + output.num_scheduled_tokens[request_id]
            end = min(end, order.save_tokens)
            if end > followed.saved:
                saves.append(Copy(order, pages_now, followed.saved, end))
                followed.saved = end
            elif followed.saved >= order.save_tokens and not followed.has_ended:
                followed.has_ended = True
                self._ended.append(order)
        self._begin_step(output, starts)
        ended, self._ended = tuple(self._ended), []
        return StepOrders(tuple(loads), tuple(saves), ended)

    def finish(self, request: Request) -> None:
        """Reports, once no step uses the blocks, that the request has ended."""
        followed = self._followed.pop(request.request_id, None)
        order = KVOrder.of(request.kv_transfer_params)
        if order is not None and (followed is None or not followed.has_ended):
            self._ended.append(order)

    def _begin_step(self, output: SchedulerOutput, starts: Mapping[str, int]) -> None:
        counts = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        decoding = {
            request_id for request_id, made in zip(cached.req_ids, cached.num_output_tokens, strict=True) if made
        }
        decoding |= {
            new.req_id
            for new in output.scheduled_new_reqs
            if new.req_id in self._followed
            and not self._followed[new.req_id].order.save_tokens
            and 0 < self._followed[new.req_id].order.load_tokens <= new.num_computed_tokens
        }
        prefills = {
            self._followed[name].order.request_id if name in self._followed else name: (start, counts[name])
            for name, start in starts.items()
            if name not in decoding
        }
        now_s = time.monotonic()
        self._steps.append(
            Stepped(
                began_s=now_s,
                ended_s=now_s,
                prefill_tokens=prefills,
                num_decode_seqs=len(decoding),
                decode_context_tokens=sum(starts[name] + counts[name] for name in decoding),
                num_free_blocks=0 if self.pool is None else self.pool.get_num_free_blocks(),
                num_preempted=len(output.preempted_req_ids or ()),
            )
        )

    def end_step(self) -> None:
        """Reports the oldest step under way."""
        if self._steps:
            step = self._steps.popleft()
            fields = {name: getattr(step, name) for name in step.__slots__}
            self._reports.send(Stepped(**{**fields, "ended_s": time.monotonic()}))


class ComputingHalf:
    """Owns the view of this process's part of the paged cache."""

    def __init__(self, memory: StagingMemory, reports: Reports, config: VllmConfig) -> None:
        self._memory = memory
        self._reports = reports
        self._config = config
        self._rank = config.parallel_config.rank
        self._layers: dict[str, tuple[int, int, PagedLayer]] = {}  # name: (place here, layer of the model, cache)
        self._heads = slice(0, memory.layout.num_kv_heads)
        self._failed: set[int] = set()
        self._foreign: set[int] = set()  # uses that were found ended while their request was not

    def register(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Learns how each layer of the cache lies in memory. Raises Incompatible."""
        layout = self._memory.layout
        tensor_parallel = self._config.parallel_config.tensor_parallel_size
        num_heads = max(1, layout.num_kv_heads // tensor_parallel)
        first = get_tensor_model_parallel_rank() * layout.num_kv_heads // tensor_parallel
        self._heads = slice(first, first + num_heads)
        modules = self._config.compilation_config.static_forward_context
        for name in sorted(kv_caches, key=extract_layer_index):
            module = modules[name]
            write = _latent_write(module) if self._config.model_config.use_mla else _write(module)
            layer = PagedLayer.probed(kv_caches[name], num_heads, layout.block_tokens, layout.head_dim, write)
            self._layers[name] = (len(self._layers), extract_layer_index(name), layer)

    def begin(self, orders: StepOrders) -> None:
        """Loads what the step needs, and reports requests whose blocks are not touched any more."""
        for copy in orders.loads:
            blocks = copy.order.blocks
            for _, index, layer in self._layers.values():
                values = self._memory.read(index, self._heads, blocks, copy.start, copy.end)
                layer.write(copy.pages, copy.start, values)
            if not self._memory.has_stamps(blocks, copy.order.use):
                self._foreign.add(copy.order.use)
                size = self._memory.layout.block_tokens
                self._failed.update(copy.pages[copy.start // size : -(-copy.end // size)])
        self._reports.send(*(Ended(order.request_id, order.use, self._rank) for order in orders.ended))

    def save(self, name: str, orders: StepOrders) -> None:
        """Copies one layer of the step's tokens to the arena."""
        place, index, layer = self._layers[name]
        for copy in orders.saves:
            if copy.order.use in self._foreign:
                continue
            num_tokens = copy.end - copy.start
            values = layer.read(copy.pages, copy.start, num_tokens)
            self._memory.write(index, self._heads, copy.order.blocks, copy.start, values)
            is_last = place + 1 == len(self._layers)
            if is_last or (place + 1) % self._report_every(num_tokens) == 0:
                whole = copy.end if is_last else copy.start
                self._reports.send(Saved(copy.order.request_id, whole, copy.end, place + 1, self._rank))

    def take_failed(self) -> set[int]:
        """Pages whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

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
