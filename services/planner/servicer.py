"""halfmoon.Planner on the wire: protobuf in and out of `capacity`, jobs and stored plans."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import grpc

from halfmoon.engine.model_config import ModelConfig
from halfmoon.errors import InvalidRequest, Unauthenticated, Unavailable
from halfmoon.ledger.plans import NewPlan, StoredPlan
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.rpc.operator_token import AUTHORIZATION_KEY, OperatorToken
from halfmoon.sim.latency_sources.hardware import DEVICES
from halfmoon.sim.latency_sources.model_catalogue import MODELS
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS
from services.planner.capacity import CapacityQuestion, capacity
from services.planner.fleet import Fleet
from services.planner.job import JobProgress, PlanJob, PointJob
from services.planner.jobs import Jobs, JobWaits
from services.planner.kept_plans import KeptPlans
from services.planner.wire import files_of, plan_request, plan_yaml, point_request, set_fields, stored_plan

log = logging.getLogger(__name__)

_DEFAULT_BLOCK_TOKENS = 64
_DEFAULT_RESERVED_SHARE = 0.1
_MOST_LISTED = 100
MAX_REQUEST_BYTES = 64 << 20  # including its files: traces have tens of megabytes


class PlannerServicer(planner_pb2_grpc.PlannerServicer):
    """Owns nothing. `read_config` gets a model's configuration and may block."""

    def __init__(
        self,
        read_config: Callable[[str], ModelConfig],
        plans: KeptPlans,
        jobs: Jobs,
        token: OperatorToken,
        num_processes: int,
        fleet: Fleet,
    ) -> None:
        self._read_config = read_config
        self._plans = plans
        self._jobs = jobs
        self._token = token
        self._num_processes = num_processes
        self._fleet = fleet

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        planner_pb2_grpc.add_PlannerServicer_to_server(self, server)

    async def Capacity(
        self, request: planner_pb2.CapacityRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.CapacityResponse:
        """See planner.proto."""
        self._check_operator(context)
        if not request.model:
            raise InvalidRequest("a capacity question needs model", param="model")
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

    async def Plan(
        self, request: planner_pb2.PlanRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.PlanUpdate]:
        """See planner.proto."""
        self._check_operator(context)
        plan, files = plan_request(request), files_of(request.files)
        job = PlanJob(plan, self._num_processes, request.with_curves)
        async with aclosing(self._jobs.updates(job, files)) as updates:
            async for update in updates:
                if isinstance(update, JobWaits):
                    yield planner_pb2.PlanUpdate(waiting=_waiting(update))
                elif isinstance(update, JobProgress):
                    yield planner_pb2.PlanUpdate(progress=_progress(update))
                else:
                    result = update.result
                    new = NewPlan(
                        plan.model, set_fields(request), {"plan_yaml": result["plan_yaml"]}, result["summary"]
                    )
                    yield planner_pb2.PlanUpdate(plan=stored_plan(await self._kept(new)))

    async def Simulate(
        self, request: planner_pb2.SimulateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.SimulateUpdate]:
        """See planner.proto."""
        self._check_operator(context)
        point, files = point_request(request), files_of([request.cluster, *request.files])
        async with aclosing(self._jobs.updates(PointJob(point, request.with_requests), files)) as updates:
            async for update in updates:
                if isinstance(update, JobWaits):
                    yield planner_pb2.SimulateUpdate(waiting=_waiting(update))
                elif isinstance(update, JobProgress):
                    yield planner_pb2.SimulateUpdate(progress=_progress(update))
                else:
                    yield planner_pb2.SimulateUpdate(result_json=json.dumps(update.result))

    async def ListPlans(
        self, request: planner_pb2.ListPlansRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.ListPlansResponse:
        """See planner.proto."""
        self._check_operator(context)
        if not 1 <= request.limit <= _MOST_LISTED:
            raise InvalidRequest(f"limit must be 1..{_MOST_LISTED}", param="limit")
        return planner_pb2.ListPlansResponse(plans=map(stored_plan, await self._plans.newest(request.limit)))

    async def Catalogue(
        self, request: planner_pb2.CatalogueRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.CatalogueResponse:
        """See planner.proto."""
        self._check_operator(context)
        return planner_pb2.CatalogueResponse(
            gpus=DEVICES, models=MODELS, workloads=KNOWN_LENGTHS, can_apply=self._fleet.can_change
        )

    async def PreviewApply(
        self, request: planner_pb2.ApplyRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.WorkerChange:
        """See planner.proto."""
        self._check_operator(context)
        return await self._fleet.preview(await self._plan_yaml(request))

    async def Apply(
        self, request: planner_pb2.ApplyRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.ApplyUpdate]:
        """See planner.proto."""
        self._check_operator(context)
        log.info("plan.applied", extra={"plan_id": request.plan_id, "stop_first": request.stop_first})
        async with aclosing(self._fleet.change(await self._plan_yaml(request), request.stop_first)) as updates:
            async for update in updates:
                yield update

    async def _plan_yaml(self, request: planner_pb2.ApplyRequest) -> str:
        return plan_yaml(await self._plans.of_id(request.plan_id)) if self._fleet.can_change else ""

    async def _kept(self, plan: NewPlan) -> StoredPlan:
        """Stores a plan in the ledger; if that is unavailable, the plan is returned all the same, without a number."""
        try:
            return await self._plans.add(plan)
        except Unavailable as error:
            log.error("plan.not_kept", extra={"reason": error.message})
            return StoredPlan(0, datetime.now(UTC), plan)

    def _check_operator(self, context: grpc.aio.ServicerContext) -> None:
        if self._token.is_open:
            return
        if not self._token.is_known:
            raise Unauthenticated(
                "the planner is closed: it listens beyond loopback and has no operator token; "
                "start it with --operator-token, or HALFMOON_PLANNER_OPERATOR_TOKEN"
            )
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        if not self._token.is_in(str(metadata.get(AUTHORIZATION_KEY, ""))):
            raise Unauthenticated("the operator token is needed: send the metadata 'authorization: Bearer <token>'")


def _waiting(update: JobWaits) -> planner_pb2.Waiting:
    return planner_pb2.Waiting(ahead=update.num_ahead)


def _progress(update: JobProgress) -> planner_pb2.Progress:
    return planner_pb2.Progress(what=update.what, done=update.done, total=update.total)


def _question(request: planner_pb2.CapacityRequest) -> CapacityQuestion:
    return CapacityQuestion(
        dtype=request.dtype,
        memory_bytes=request.memory_bytes,
        num_devices=request.num_devices,
        context_tokens=request.context_tokens,
        block_tokens=request.block_tokens or _DEFAULT_BLOCK_TOKENS,
        reserved_share=request.reserved_share or _DEFAULT_RESERVED_SHARE,
    )
