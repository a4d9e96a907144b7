"""Serves halfmoon.Planner: turns messages into jobs, and their updates and the stored plans into messages."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime

import grpc

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.ledger.plans import NewPlan, StoredPlan
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.sim.latency_sources.hardware import DEVICES
from halfmoon.sim.latency_sources.model_catalogue import MODELS
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS
from services.planner.fleet import Fleet
from services.planner.job import JobProgress, PlanJob
from services.planner.jobs import Jobs, JobWaits
from services.planner.kept_plans import KeptPlans
from services.planner.wire import files_of, plan_request, plan_yaml, set_fields, stored_plan, target_map

log = logging.getLogger(__name__)

_MAX_LISTED = 100
MAX_REQUEST_BYTES = 64 << 20  # files included: traces have tens of megabytes


class PlannerServicer(planner_pb2_grpc.PlannerServicer):
    """Knows the jobs, the stored plans and the fleet. Owns nothing."""

    def __init__(
        self,
        plans: KeptPlans,
        jobs: Jobs,
        num_processes: int,
        fleet: Fleet,
    ) -> None:
        self._plans = plans
        self._jobs = jobs
        self._num_processes = num_processes
        self._fleet = fleet

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        planner_pb2_grpc.add_PlannerServicer_to_server(self, server)

    async def Plan(
        self, request: planner_pb2.PlanRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.PlanUpdate]:
        """See planner.proto."""
        options, files = plan_request(request), files_of(request.files)
        job = PlanJob(options, self._num_processes, request.with_curves, request.is_map)
        async with aclosing(self._jobs.updates(job, files)) as updates:
            async for update in updates:
                if isinstance(update, JobWaits):
                    yield planner_pb2.PlanUpdate(waiting=_waiting(update))
                elif isinstance(update, JobProgress):
                    yield planner_pb2.PlanUpdate(progress=_progress(update))
                elif job.is_map:
                    yield planner_pb2.PlanUpdate(map=target_map(update.result))
                else:
                    result = update.result
                    new = NewPlan(
                        options.model, set_fields(request), {"plan_yaml": result["plan_yaml"]}, result["summary"]
                    )
                    yield planner_pb2.PlanUpdate(plan=stored_plan(await self._kept(new)))

    async def ListPlans(
        self, request: planner_pb2.ListPlansRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.ListPlansResponse:
        """See planner.proto."""
        if not 1 <= request.limit <= _MAX_LISTED:
            raise InvalidRequest(f"limit must be 1..{_MAX_LISTED}", param="limit")
        return planner_pb2.ListPlansResponse(plans=map(stored_plan, await self._plans.newest(request.limit)))

    async def Catalogue(
        self, request: planner_pb2.CatalogueRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.CatalogueResponse:
        """See planner.proto."""
        return planner_pb2.CatalogueResponse(
            gpus=DEVICES, models=MODELS, workloads=KNOWN_LENGTHS, can_apply=self._fleet.can_change
        )

    async def PreviewApply(
        self, request: planner_pb2.ApplyRequest, context: grpc.aio.ServicerContext
    ) -> planner_pb2.WorkerChange:
        """See planner.proto."""
        return await self._fleet.preview(await self._plan_yaml(request))

    async def Apply(
        self, request: planner_pb2.ApplyRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.ApplyUpdate]:
        """See planner.proto."""
        log.info("plan.applied", extra={"plan_id": request.plan_id, "stop_first": request.stop_first})
        async with aclosing(self._fleet.change(await self._plan_yaml(request), request.stop_first)) as updates:
            async for update in updates:
                yield update

    async def _plan_yaml(self, request: planner_pb2.ApplyRequest) -> str:
        return plan_yaml(await self._plans.of_id(request.plan_id)) if self._fleet.can_change else ""

    async def _kept(self, plan: NewPlan) -> StoredPlan:
        """Stores the plan in the ledger. If the ledger does not answer, returns the plan with id 0."""
        try:
            return await self._plans.add(plan)
        except Unavailable as error:
            log.error("plan.not_kept", extra={"reason": error.message})
            return StoredPlan(0, datetime.now(UTC), plan)


def _waiting(update: JobWaits) -> planner_pb2.Waiting:
    return planner_pb2.Waiting(ahead=update.num_ahead)


def _progress(update: JobProgress) -> planner_pb2.Progress:
    return planner_pb2.Progress(what=update.what, done=update.done, total=update.total)
