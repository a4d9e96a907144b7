"""`halfmoon up --plan`: the workers of a plan's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfmoon.plan.plan_file import read_plan
from halfmoon.policy.cluster_view import Role
from halfmoon.up import UpOptions

_ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def planned_options(options: UpOptions, path: Path, model: str | None) -> UpOptions:
    """`options` with the plan's workers, and its model unless one is given. Raises InvalidRequest for no plan."""
    planned = read_plan(path)
    kinds = {role: kind for role in _ROLES if (kind := planned.kind(role)) is not None}
    return replace(
        options,
        model=model or planned.model_name,
        handover_codec=planned.handover_codec if options.handover_codec == "raw" else options.handover_codec,
        num_prefill=planned.count("prefill"),
        num_decode=planned.count("decode"),
        num_both=planned.count("both"),
        worker_arguments={role: kind.arguments for role, kind in kinds.items()},
        worker_devices={role: kind.tp * kind.pp for role, kind in kinds.items()},
    )
