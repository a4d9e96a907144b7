"""Requests for jobs as they come, checked, and what jobs say as it goes out."""

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
from halfmoon.sim.point import PointRequest

MOST_REQUESTS = 20_000  # simulated at a time
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\.(json|jsonl|csv|yaml)")
_NAMES = ("model", "workload", "latency")  # that may be files
_Request = TypeVar("_Request", PlanRequest, PointRequest)


def plan_request(message: planner_pb2.PlanRequest) -> PlanRequest:
    """Raises InvalidRequest, naming the field."""
    for name in ("model", "gpu", "workload", "ttft_s", "tpot_s"):
        if not getattr(message, name):
            raise InvalidRequest(f"a plan needs {name}", param=name)
    return _checked(PlanRequest, {**set_fields(message), "prices": dict(message.prices)})


def point_request(message: planner_pb2.SimulateRequest) -> PointRequest:
    """Raises InvalidRequest, naming the field."""
    if not message.cluster.name or not message.workload:
        missing = "workload" if message.cluster.name else "cluster"
        raise InvalidRequest(f"a simulation needs a {missing}", param=missing)
    _check_cluster(message.cluster.content)
    return _checked(PointRequest, {**set_fields(message), "cluster": message.cluster.name})


def files_of(messages: Sequence[planner_pb2.File]) -> dict[str, bytes]:
    """By name. Raises InvalidRequest for a name that is none of a file of ours."""
    for one in messages:
        if not _FILE_NAME.fullmatch(one.name):
            raise InvalidRequest(
                f"a file's name has letters, digits, ._- and ends in .json, .jsonl, .csv or .yaml, not {one.name!r}",
                param="files",
            )
    return {one.name: one.content for one in messages}


def set_fields(message: Message) -> dict[str, Any]:
    """Those of plain values that were set."""
    return {field.name: value for field, value in message.ListFields() if isinstance(value, str | float | int)}


def stored_plan(stored: StoredPlan) -> planner_pb2.StoredPlan:
    """As it is told."""
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
    """The file's text; empty for a plan that was kept without it."""
    return str(stored.plan.layout.get("plan_yaml", ""))


def _check_cluster(content: bytes) -> None:
    """What its latencies name; all else is the simulator's to check."""
    try:
        found = yaml.safe_load(content)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"the cluster cannot be read: {error}", param="cluster") from error
    workers = found.get("workers") if isinstance(found, dict) else None
    for one in (found, *(workers if isinstance(workers, list) else ())):
        if isinstance(one, dict):
            _check_no_path("latency", one.get("latency"))


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
