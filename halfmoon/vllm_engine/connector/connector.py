"""The part of us that runs inside vLLM, as its interface for connectors. See the room's text.

vLLM imports it by name. Each process has one of the two halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.vllm_engine.connector.computing_half import ComputingHalf
from halfmoon.vllm_engine.connector.scheduling_half import SchedulingHalf, StepEnd, StepOrders
from halfmoon.vllm_engine.reports import ReportSender
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


class HalfmoonConnector(KVConnectorBase_V1):
    """vLLM's interface over the half that this process has."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        reports, layout = ReportSender(extra["reports"]), KVLayout(**extra["layout"])
        self._scheduling, self._computing = None, None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduling = SchedulingHalf(reports, layout.block_tokens)
        else:
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
        return self.scheduling.finish(request, block_ids), None

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

    def build_connector_worker_meta(self) -> StepEnd:
        """What makes vLLM call `update_connector_output` for each step, also for one that computes nothing."""
        return StepEnd()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.computing.take_released(), None

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
