"""Takes the workers of a plan, for a system that starts from it or a running system that it is applied to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfmoon.config.gateway import GatewayConfig
from halfmoon.errors import Incompatible
from halfmoon.plan.plan_file import PlannedLayout, PlannedWorkers, parse_plan
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.sim.latency_sources.model_catalogue import known_shape, model_shape
from halfmoon.sim.latency_sources.model_shape import ModelShape
from halfmoon.up.up_options import PreparedModel, UpOptions, WorkerStart


def applied_options(options: UpOptions, model: PreparedModel, plan_yaml: str) -> UpOptions:
    """Returns the options of the running system with the plan's workers instead of its own.

    Blocks to read the model's config. Raises InvalidRequest for a malformed plan, and Incompatible for a plan that
    would change more than the workers.
    """
    planned = parse_plan(plan_yaml, Path("plan.yaml"))
    if not _is_served(planned.model_name, options, model):
        raise Incompatible(
            f"the plan is for {planned.model_name!r}, and {model.name!r} is served here: search for a plan for that "
            "model, or download this one and start it with `halfmoon up --plan plan.yaml --model MODEL`"
        )
    if planned.handover_codec not in ("raw", options.handover_codec):
        raise Incompatible(
            f"the plan hands KV over as {planned.handover_codec}, and the gateway was started with "
            f"{options.handover_codec}, which it keeps: start again with `halfmoon up --plan plan.yaml`"
        )
    for name, value in planned.gateway.model_dump(exclude_defaults=True).items():
        default = str(GatewayConfig.model_fields[name].default)
        running = options.settings.get("gateway", {}).get(name, default)
        if running != str(value):
            raise Incompatible(
                f"the plan counts on {name} {value}, and the gateway was started with {running}, which it keeps: start "
                "again with `halfmoon up --plan plan.yaml`"
            )
    return with_planned_workers(options, planned.cluster)


def with_planned_workers(options: UpOptions, planned: PlannedLayout) -> UpOptions:
    """Returns `options` with the plan's workers instead of its own."""
    starts: dict[Role, list[WorkerStart]] = {
        role: [_start(worker, options) for worker in planned.of_role(role)] for role in ROLES
    }
    return replace(
        options,
        num_prefill=len(starts["prefill"]),
        num_decode=len(starts["decode"]),
        num_both=len(starts["both"]),
        worker_starts=starts,
        is_planned=True,
    )


def _start(worker: PlannedWorkers, options: UpOptions) -> WorkerStart:
    unit = "" if worker.first_node is None else f"unit-{worker.first_node}"
    arguments = (*worker.arguments, *(("--unit", unit) if unit else ()))
    start = WorkerStart(arguments, worker.num_devices, gpu=worker.gpu or "")
    return start if options.on == "this-host" else start._replace(unit=unit)


def _is_served(name: str, options: UpOptions, model: PreparedModel) -> bool:
    """Whether the served model has that name, or the same shape as the catalogue's model of that name."""
    if name in (options.model, model.name):
        return True
    known = known_shape(name)
    return known is not None and _nameless(known) == _nameless(model_shape(model.path))


def _nameless(shape: ModelShape) -> ModelShape:
    return replace(shape, name="", context_tokens=None)
