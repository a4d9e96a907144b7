"""vLLM's paths for operators, and pages about the API itself."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.errors import NoCapacity
from services.gateway.openai.document.parameter_table import ENDPOINTS
from tests.services.gateway.fakes import running_fleet, served_model
from tests.services.gateway.test_access import ask

OPERATOR = {"Authorization": "Bearer op"}


@pytest.mark.parametrize(("method", "path"), [("POST", "/reset_prefix_cache"), ("GET", "/server_info")])
async def test_they_are_for_operators(tmp_path: Path, method: str, path: str) -> None:
    async with running_fleet(tmp_path, api_key=("k",), operator_token="op") as fleet:
        assert (await ask(fleet, method, path, headers={"Authorization": "Bearer k"}))[0] == 401
        status, _, said = await ask(fleet, method, path, headers=OPERATOR)
        assert status == 200, said


async def test_a_worker_that_does_not_answer_is_no_success(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        status, _, said = await ask(fleet, "POST", "/reset_prefix_cache")
        assert (status, said["success"]) == (200, True)
        prefill.refuse_emptying = NoCapacity("not now")
        status, _, said = await ask(fleet, "POST", "/reset_prefix_cache")
        assert (status, said["success"]) == (200, False)
        assert {one["worker_id"]: one["error"] for one in said["workers"] if "error" in one} == {"p0": "not now"}


async def test_what_the_gateway_was_started_with_has_no_secrets(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_key=("hm-secret",), operator_token="op") as fleet:
        _, _, said = await ask(fleet, "GET", "/server_info", headers=OPERATOR)
    assert said["settings"]["max_body_bytes"] > 0
    assert "hm-secret" not in str(said)
    assert "'op'" not in str(said)


async def test_the_page_needs_no_other_host(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_key=("k",)) as fleet:
        status, headers, page = await ask(fleet, "GET", "/docs")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|https?://|<link", page)
    for path, schema in ENDPOINTS.items():
        assert f"POST {path}</code>" in page
        assert all(f"<code>{name}</code>" in page for name in schema.model_fields)


async def test_the_tokenizer_is_the_checkpoints(tmp_path: Path) -> None:
    tokenizer = Tokenizer(prepare_checkpoint("demo"))
    model = dataclasses.replace(served_model(), tokenizer_config=tokenizer.config)
    async with running_fleet(tmp_path, model=model) as fleet:
        _, _, said = await ask(fleet, "GET", "/tokenizer_info")
    assert said["chat_template"] == tokenizer.chat_template
    assert {type(said[name]) for name in ("tokenizer_class", "eos_token", "bos_token")} == {str}
