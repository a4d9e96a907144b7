"""halfmoon.Planner on the wire: protobuf in and out of `capacity`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from halfmoon.engine.model_config import ModelConfig
from halfmoon.errors import InvalidRequest
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from services.planner.capacity import CapacityQuestion, capacity

_DEFAULT_BLOCK_TOKENS = 64
_DEFAULT_RESERVED_SHARE = 0.1


class PlannerServicer(planner_pb2_grpc.PlannerServicer):
    """Knows how to get a model's configuration (`read_config`, which may block) and nothing else of its own."""

    def __init__(self, read_config: Callable[[str], ModelConfig]) -> None:
        self._read_config = read_config

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        planner_pb2_grpc.add_PlannerServicer_to_server(self, server)

    async def Capacity(
        self, request: planner_pb2.CapacityRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.CapacityResponse:
        """See planner.proto."""
        if not request.model:
            raise InvalidRequest("which model?", param="model")
        config = await asyncio.to_thread(self._read_config, request.model)
        answer = capacity(config, _question(request))
        return planner_pb2.CapacityResponse(
            weight_bytes=answer.weight_bytes,
            kv_block_bytes=answer.kv_block_bytes,
            num_blocks=answer.num_blocks,
            num_sequences=answer.num_sequences,
            fits=answer.fits,
            explanation=answer.explanation,
        )


def _question(request: planner_pb2.CapacityRequest) -> CapacityQuestion:
    return CapacityQuestion(
        dtype=request.dtype,
        memory_bytes=request.memory_bytes,
        num_devices=request.num_devices,
        context_tokens=request.context_tokens,
        block_tokens=request.block_tokens or _DEFAULT_BLOCK_TOKENS,
        reserved_share=request.reserved_share or _DEFAULT_RESERVED_SHARE,
    )
