"""Package docstrings name the files that a newcomer reads first; those files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = [
    *(f"halfmoon/{room}" for room in ("engine", "kv", "rpc", "worker", "ledger", "policy", "sim", "plan")),
    "halfmoon/catalog",
    "halfmoon/architectures",
    *(f"halfmoon/{room}" for room in ("profiling", "replay", "cli", "up", "config")),
    *(f"services/{room}" for room in ("gateway", "kvstore", "planner", "simulation")),
    "console",
]
_ORDER = re.compile(r"(?:Read in this order|[Rr]eading order):(.*)", re.DOTALL)


def reading_order(package: Path) -> list[str]:
    """The files of a package's reading order, as paths without `.py`."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    order = _ORDER.search(docstring)
    if order is None:
        return []
    quoted: list[str] = re.findall(r"`([\w/]+)\.py`", order[1])
    return quoted or re.findall(r"[\w/]+(?=[,.])|(?<=and )[\w/]+", order[1].split("\n\n")[0])


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_reading_order_of_files_that_exist(room: str) -> None:
    package = ROOT / room
    names = reading_order(package)
    assert 3 <= len(names) <= 14, names
    missing = [
        name
        for name in names
        if not any((top / f"{name}.py").exists() or (top / name).is_dir() for top in (package, ROOT))
    ]
    assert missing == []
