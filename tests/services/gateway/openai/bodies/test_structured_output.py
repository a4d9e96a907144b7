"""Structured output at the front door: what the workers are told, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.engine.request import ONE_LINE_STYLE
from halfmoon.errors import ConstraintFailed
from halfmoon.pb.types_pb2 import Constraint
from tests.services.gateway.fakes import MODEL, Script, running_fleet

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}, "required": ["ä"]}
HI = [{"role": "user", "content": "hi"}]
OBJECT = '{"type": "object"}'


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, Constraint.JSON_SCHEMA, OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Constraint.JSON_SCHEMA,
            json.dumps({**SCHEMA, "additionalProperties": False}, ensure_ascii=False),
        ),
        *(
            ({"response_format": {"type": kind, name: {"type": "object"}}}, Constraint.JSON_SCHEMA, OBJECT)
            for kind, name in (
                *(("json_object", "schema"), ("json_object", "value"), ("json", "value"), ("json_schema", "schema")),
            )
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, Constraint.REGEX, "a+"),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, Constraint.REGEX, "a+"),
        ({"structured_outputs": {"json": OBJECT}}, Constraint.JSON_SCHEMA, OBJECT),
        ({"structured_outputs": {"json": {"type": "object"}}}, Constraint.JSON_SCHEMA, OBJECT),
        ({"structured_outputs": {"json_object": True}}, Constraint.JSON_SCHEMA, OBJECT),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
            Constraint.JSON_SCHEMA,
            json.dumps(SCHEMA, ensure_ascii=False),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Constraint.JSON_SCHEMA,
            json.dumps({"type": "object", "x-guidance": ONE_LINE_STYLE}),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Constraint.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.CHOICE, '["a", "b"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint.GRAMMAR, 'start: "a"'),
        ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, Constraint.REGEX, "a+"),
    ],
)
async def test_the_constraint_goes_to_the_workers(
    tmp_path: Path, body: dict[str, Any], kind: Constraint.Kind.ValueType, source: str
) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        prefill, _ = await fleet.pair()
        for path, prompt in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
            async with session.post(path, json={"model": MODEL, **prompt, **body}) as response:
                assert response.status == 200, await response.text()
        for request in prefill.calls.prefills:
            constraint = request.generation.sampling.constraint
            assert (constraint.kind, constraint.source) == (kind, source)


async def test_text_is_no_constraint(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        prefill, _ = await fleet.pair()
        extras: list[dict[str, Any]] = [{"response_format": {"type": "text"}}, {"structured_outputs": {}}]
        for extra in extras:
            async with session.post("/v1/completions", json={"model": MODEL, "prompt": "x", **extra}) as response:
                assert response.status == 200, await response.text()
        assert not any(one.generation.sampling.HasField("constraint") for one in prefill.calls.prefills)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "takes json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "nothing beside it"),
        ({"response_format": {"type": "json", "value": "a+"}}, "response_format.value", "a schema is an object"),
        ({"response_format": {"type": "json"}}, "response_format.schema", "takes schema or value"),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.schema", "one of"),
        ({"response_format": {"type": "regex", "schema": {}}}, "response_format.schema", "takes pattern"),
        ({"response_format": {"type": "regex", "pattern": "["}}, "response_format", "regex"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs", "nonsense"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "several"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "send one",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "leave it out"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "leave it out"),
        ({"guided_json": OBJECT, "guided_regex": "a"}, "guided_regex", "one form"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "one form"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, body: dict[str, Any], param: str, reason: str) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        await fleet.pair()
        async with session.post("/v1/completions", json={"model": MODEL, "prompt": "x", **body}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param), error
            assert param in error["message"]
            assert reason in error["message"]


DEEP = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1_500)}
DEADLY = {"$defs": {**DEEP, "d1500": {"type": "null"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEADLY}}}, "250 levels"),
        ({"structured_outputs": {"grammar": f"start: %json {json.dumps(DEADLY)}"}}, "too complex"),
    ],
)
async def test_what_overflows_the_stack_is_refused_and_the_gateway_goes_on(
    tmp_path: Path, body: dict[str, Any], reason: str
) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        await fleet.pair()
        for path, prompt in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
            async with session.post(path, json={"model": MODEL, **prompt, **body}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, next(iter(body)))
                assert reason in error["message"]
        async with session.post("/v1/completions", json={"model": MODEL, "prompt": "x"}) as response:
            assert response.status == 200


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_constraint_that_fails_on_a_worker_is_the_clients_mistake(
    tmp_path: Path, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        prefill, _ = await fleet.pair(Script(fails_at=0 if phase == "prefill" else 1))
        if phase == "prefill":
            prefill.refuse = [ConstraintFailed()]
        body = {"model": MODEL, "prompt": "x", "structured_outputs": {"regex": "a+"}}
        async with session.post("/v1/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (400, "invalid_request_error")
            assert "make its schema, expression or grammar simpler" in error["message"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
