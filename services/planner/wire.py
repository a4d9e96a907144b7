"""Parses and checks incoming requests for jobs, and converts plans for the wire."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import yaml
from google.protobuf.message import Message
from pydantic import TypeAdapter, ValidationError

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.plans import StoredPlan
from halfmoon.pb import planner_pb2
from halfmoon.plan.request import PlanRequest
from halfmoon.sim.simulate_point import PointRequest

MOST_REQUESTS = 20_000  # limit on one simulation
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\.(json|jsonl|csv|yaml)")
_NAMES = ("model", "workload", "latency")  # fields that may name files
_Request = TypeVar("_Request", PlanRequest, PointRequest)


def plan_request(message: planner_pb2.PlanRequest) -> PlanRequest:
    """Parses a plan request. Raises InvalidRequest that names the field."""
    for name in ("model", "gpu", "workload", "ttft_s", "tpot_s"):
        if not getattr(message, name):
            raise InvalidRequest(f"a plan needs {name}", param=name)
    return _checked(PlanRequest, {**set_fields(message), "prices": dict(message.prices)})


def point_request(message: planner_pb2.SimulateRequest) -> PointRequest:
    """Parses a simulation request. Raises InvalidRequest that names the field."""
    if not message.cluster.name or not message.workload:
        missing = "workload" if message.cluster.name else "cluster"
        raise InvalidRequest(f"a simulation needs a {missing}", param=missing)
    _check_cluster(message.cluster.content)
    return _checked(PointRequest, {**set_fields(message), "cluster": message.cluster.name})


def files_of(messages: Sequence[planner_pb2.File]) -> dict[str, bytes]:
    """Files by name. Raises InvalidRequest for an unacceptable name."""
    for file in messages:
        if not _FILE_NAME.fullmatch(file.name):
            raise InvalidRequest(
                f"a file's name has letters, digits, ._- and ends in .json, .jsonl, .csv or .yaml, not {file.name!r}",
                param="files",
            )
    return {file.name: file.content for file in messages}


def set_fields(message: Message) -> dict[str, Any]:
    """The fields with plain values that were set."""
    return {field.name: value for field, value in message.ListFields() if isinstance(value, str | float | int)}


def stored_plan(stored: StoredPlan) -> planner_pb2.StoredPlan:
    """Converts a stored plan to its message."""
    plan = stored.plan
    return planner_pb2.StoredPlan(
        id=stored.id,
        created_at=stored.created_at.isoformat(),
        model=plan.model,
        request_json=json.dumps(plan.goal),
        summary_json=json.dumps(plan.figures),
        plan_yaml=plan_yaml(stored),
    )


def plan_yaml(stored: StoredPlan) -> str:
    """Text of the plan's file; empty for a plan stored without it."""
    return str(stored.plan.layout.get("plan_yaml", ""))


def _check_cluster(content: bytes) -> None:
    """Checks the latencies of a cluster file; the simulator checks everything else."""
    try:
        cluster = yaml.safe_load(content)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"the cluster cannot be read: {error}", param="cluster") from error
    workers = cluster.get("workers") if isinstance(cluster, dict) else None
    for entry in (cluster, *(workers if isinstance(workers, list) else ())):
        if isinstance(entry, dict):
            _check_no_path("latency", entry.get("latency"))


def _check_no_path(name: str, value: object) -> None:
    if re.search(r"[/\\~]", str(value)):
        raise InvalidRequest(
            f"{name} {value!r} is a path, and the planner reads no files of its host: send the file along", param=name
        )


def _checked(kind: type[_Request], given: Mapping[str, Any]) -> _Request:
    known = {field.name for field in fields(kind)}
    wanted = {name: value for name, value in given.items() if name in known}
    for name in _NAMES:
        _check_no_path(name, wanted.get(name))
    if wanted.get("num_requests", 2) not in range(2, MOST_REQUESTS + 1):
        raise InvalidRequest(f"num_requests must be 2..{MOST_REQUESTS}", param="num_requests")
    try:
        return TypeAdapter(kind).validate_python(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{name}: {first['msg']}", param=name) from error
