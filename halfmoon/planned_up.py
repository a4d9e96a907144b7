"""`halfmoon up --plan`: the workers of a plan's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfmoon.plan.plan_file import read_plan
from halfmoon.policy.cluster_view import Role
from halfmoon.up_services import UpOptions, WorkerStart

_ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def planned_options(options: UpOptions, path: Path, model: str | None) -> UpOptions:
    """`options` with the plan's workers, and its model unless one is given. Raises InvalidRequest for no plan."""
    planned = read_plan(path)
    return replace(
        options,
        model=model or planned.model_name,
        handover_codec=planned.handover_codec if options.handover_codec == "raw" else options.handover_codec,
        num_prefill=len(planned.workers("prefill")),
        num_decode=len(planned.workers("decode")),
        num_both=len(planned.workers("both")),
        worker_starts={
            role: [WorkerStart(one.arguments, one.tp * one.pp) for one in planned.workers(role)] for role in _ROLES
        },
    )
