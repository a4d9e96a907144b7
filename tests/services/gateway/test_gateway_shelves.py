"""The shelves of the gateway import one way, in the order that its docstring names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[3] / "services" / "gateway"
ORDER = (
    "settings",
    "cluster",
    "http",
    "sandbox",
    "replies",
    "openai",
    "progress",
    "repeatable",
    "request",
    "detached_request",
    "leased_tasks",
    "telemetry",
    "routing",
    "peers",
    "control",
    "responses",
    "batches",
)


def imported_shelves(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("services.gateway."):
            yield node.module.split(".")[2]


@pytest.mark.parametrize("shelf", ORDER)
def test_a_shelf_imports_only_those_before_it(shelf: str) -> None:
    files = [ROOM / f"{shelf}.py"] if (ROOM / f"{shelf}.py").exists() else sorted((ROOM / shelf).rglob("*.py"))
    allowed = {*ORDER[: ORDER.index(shelf)], shelf}
    assert files
    assert {(file.name, name) for file in files for name in imported_shelves(file) if name not in allowed} == set()
