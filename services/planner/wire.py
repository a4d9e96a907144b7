"""Checks and converts the planner's messages: requests to plan options, stored plans to messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.message import Message
from pydantic import TypeAdapter, ValidationError

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.plans import StoredPlan
from halfmoon.pb import planner_pb2
from halfmoon.plan.request import PlanRequest

MOST_REQUESTS = 20_000  # of one simulated pass
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\.(json|jsonl|csv)")
_MOST_JSON_BYTES = 8 << 20  # read as a whole, at up to thirty times its size
_FILE_OPTIONS = ("model", "workload", "latency")  # options that may name a file


def plan_request(message: planner_pb2.PlanRequest) -> PlanRequest:
    """Converts a message to plan options. Raises InvalidRequest, naming the field."""
    for name in ("model", "gpu", "workload", *(() if message.is_map else ("ttft_s", "tpot_s"))):
        if not getattr(message, name):
            raise InvalidRequest(f"a plan needs {name}", param=name)
    targets = {"ttft_s": message.ttft_s, "tpot_s": message.tpot_s}
    return _checked({**set_fields(message), **targets, "prices": dict(message.prices)})


def files_of(messages: Sequence[planner_pb2.File]) -> dict[str, bytes]:
    """Maps the names of the files sent with a request to their contents.

    Raises InvalidRequest for an unsafe name, and for a JSON file that is too large to be read as a whole.
    """
    for file in messages:
        if not _FILE_NAME.fullmatch(file.name):
            raise InvalidRequest(
                f"a file's name has letters, digits, ._- and ends in .json, .jsonl or .csv, not {file.name!r}",
                param="files",
            )
        if file.name.endswith(".json") and len(file.content) > _MOST_JSON_BYTES:
            raise InvalidRequest(
                f"{file.name} has {len(file.content)} bytes, over the {_MOST_JSON_BYTES} that a JSON file may have: "
                "send a trace as .jsonl or .csv",
                param="files",
            )
    return {file.name: file.content for file in messages}


def set_fields(message: Message) -> dict[str, Any]:
    """Returns the set fields of a message that hold a text or a number."""
    return {field.name: value for field, value in message.ListFields() if isinstance(value, str | float | int)}


def target_map(result: Mapping[str, Any]) -> planner_pb2.TargetMap:
    """Converts a map's summary and chart to a message."""
    return planner_pb2.TargetMap(summary_json=json.dumps(result["summary"]), chart_json=json.dumps(result["chart"]))


def stored_plan(stored: StoredPlan) -> planner_pb2.StoredPlan:
    """Converts a plan of the ledger to a message."""
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
    """Returns the text of `plan.yaml`, or "" for a plan that was stored without it."""
    return str(stored.plan.layout.get("plan_yaml", ""))


def _check_no_path(name: str, value: object) -> None:
    if re.search(r"[/\\~]|(^|[:=,])\.\.", str(value)):
        raise InvalidRequest(
            f"{name} {value!r} is a path, and the planner reads no files of its host: send the file along", param=name
        )


def _checked(given: Mapping[str, Any]) -> PlanRequest:
    known = {field.name for field in fields(PlanRequest)}
    options = {name: value for name, value in given.items() if name in known}
    for name in _FILE_OPTIONS:
        _check_no_path(name, options.get(name))
    if options.get("num_requests", 2) not in range(2, MOST_REQUESTS + 1):
        raise InvalidRequest(f"num_requests must be 2..{MOST_REQUESTS}", param="num_requests")
    try:
        return TypeAdapter(PlanRequest).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{name}: {first['msg']}", param=name) from error
