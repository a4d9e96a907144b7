"""Imports point one way (the arrows of docs/architecture.md); torch and SQLAlchemy stay out where none is needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVICES = ("gateway", "prefill", "decode", "kvstore", "planner", "simulation")
ROOMS = (
    *(
        "errors",
        "host_limits",
        "freed_memory",
        "background",
        "yaml_text",
        "architectures",
        "pb",
        "kv",
        "config",
        "engine",
        "policy",
        "sim",
        "plan",
        "rpc",
        "ledger",
        "worker",
    ),
    *("profiling", "catalog"),
)

# A room may import itself, `halfmoon` (the version) and the rooms named here.
ALLOWED: dict[str, frozenset[str]] = {
    "halfmoon": frozenset(),
    "halfmoon.errors": frozenset(),
    "halfmoon.host_limits": frozenset(),
    "halfmoon.freed_memory": frozenset(),
    "halfmoon.background": frozenset(),
    "halfmoon.yaml_text": frozenset(),
    "halfmoon.architectures": frozenset({"halfmoon.errors"}),
    "halfmoon.pb": frozenset(),
    "halfmoon.kv": frozenset({"halfmoon.errors"}),
    "halfmoon.config": frozenset(
        f"halfmoon.{room}" for room in ("errors", "host_limits", "kv", "policy", "rpc", "sim")
    ),
    "halfmoon.policy": frozenset({"halfmoon.errors"}),
    "halfmoon.catalog": frozenset({"halfmoon.errors", "halfmoon.kv", "halfmoon.policy"}),
    "halfmoon.ledger": frozenset({"halfmoon.errors"}),
    "halfmoon.engine": frozenset(
        f"halfmoon.{room}" for room in ("errors", "host_limits", "freed_memory", "architectures", "kv", "policy")
    ),
    "halfmoon.vllm_engine": frozenset(
        f"halfmoon.{room}" for room in ("errors", "background", "yaml_text", "engine", "kv")
    ),
    "halfmoon.rpc": frozenset({"halfmoon.errors", "halfmoon.kv", "halfmoon.pb"}),
    "halfmoon.sim": frozenset(
        f"halfmoon.{room}" for room in ("errors", "yaml_text", "architectures", "kv", "policy", "catalog")
    ),
    "halfmoon.plan": frozenset(f"halfmoon.{room}" for room in ("errors", "host_limits", "yaml_text", "policy", "sim")),
    "halfmoon.worker": frozenset(
        f"halfmoon.{room}"
        for room in (
            *("config", "engine", "vllm_engine", "kv", "rpc", "pb", "policy", "sim"),
            *("background", "errors", "host_limits", "freed_memory"),
        )
    ),
    "halfmoon.profiling": frozenset(
        f"halfmoon.{room}" for room in ("kv", "rpc", "pb", "policy", "sim", "background", "errors")
    ),
    "halfmoon.up": frozenset(f"halfmoon.{room}" for room in ROOMS),
    "halfmoon.replay": frozenset(f"halfmoon.{room}" for room in (*ROOMS, "up")),
    "halfmoon.cli": frozenset(f"halfmoon.{room}" for room in (*ROOMS, "up", "replay")),
    **{f"services.{name}": frozenset(f"halfmoon.{room}" for room in ROOMS) for name in SERVICES},
    "services": frozenset(),
    "console": frozenset({"halfmoon.rpc", "halfmoon.pb"}),
}
# each shelf may import those before it
POLICY_SHELVES = ("models", "offload", "view", "values", "forecast", "placement", "admission", "scaling")
TORCH_FREE_PACKAGES = (
    *(f"halfmoon/{room}" for room in ("kv", "catalog", "config", "policy", "sim", "plan", "rpc", "ledger")),
    *(f"halfmoon/{room}" for room in ("pb", "profiling", "architectures")),
    "halfmoon/engine/scheduling",
    "halfmoon/engine/text",
    *(f"services/{name}" for name in ("gateway", "kvstore", "planner", "simulation")),
)
TORCH_FREE_FILES = (
    "halfmoon/errors.py",
    "halfmoon/host_limits.py",
    "halfmoon/freed_memory.py",
    "halfmoon/background.py",
    "halfmoon/yaml_text.py",
    *(
        f"halfmoon/engine/{name}.py"
        for name in (
            "config",
            "request",
            "request_check",
            "constraint",
            "engine_core",
            "kv_memory/kv_watch",
            "kv_memory/kv_access",
            "kv_memory/canonical_kv",
            "checkpoint/checkpoint",
            "checkpoint/converted",
        )
    ),
)
IMPORT_ALL = """
import importlib, sys
unwanted = sys.argv[1]
for name in sys.argv[2:]:
    importlib.import_module(name)
    if unwanted in sys.modules:
        sys.exit(f"{name} imports {unwanted}")
"""


def room_of(module: str) -> str | None:
    """The longest room that `module` is in; None for what is not ours."""
    parts = module.split(".")
    if parts[0] not in ("halfmoon", "services", "console"):
        return None
    if parts[0] == "console" or len(parts) == 1:
        return parts[0]
    return ".".join(parts[:2])


def imported_modules(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """Every module that `source` names in an import statement, wherever it stands."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            # `from halfmoon import kv` names a room, `from halfmoon import __version__` does not
            yield from (
                f"{origin}.{alias.name}" if origin in ("halfmoon", "services") else origin for alias in node.names
            )


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What `module` imports against the arrows."""
    room = room_of(module)
    assert room is not None
    found = []
    for imported in imported_modules(module, source, is_package):
        target = room_of(imported)
        if target is None or target == room or imported in ("halfmoon", "halfmoon.__version__"):
            continue
        if target not in ALLOWED.get(room, frozenset()):
            found.append(f"{module} imports {imported}")
    return found


def module_name(file: Path) -> str:
    """Dotted name of a file of this repository."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def our_files() -> list[Path]:
    return sorted(file for top in ("halfmoon", "services", "console") for file in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("file", our_files(), ids=module_name)
def test_imports_follow_the_arrows(file: Path) -> None:
    name = module_name(file)
    assert room_of(name) in ALLOWED, f"{name} is in a room without a rule: add one to ALLOWED and to the architecture"
    assert violations(name, file.read_text(), file.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "is_violation"),
    [
        ("halfmoon.kv.frame", "import halfmoon.rpc.peer", True),
        ("halfmoon.kv.frame", "from halfmoon.engine.request import X", True),
        ("halfmoon.kv.frame", "from halfmoon import engine", True),
        ("halfmoon.kv.frame", "from ..engine import request", True),
        ("halfmoon.kv.frame", "from . import keys", False),
        ("halfmoon.kv.frame", "from halfmoon import __version__, errors", False),
        ("halfmoon.kv.frame", "def f():\n    from services.gateway import x", True),
        ("halfmoon.kv.frame", "import numpy, halfmoonlight", False),
        ("halfmoon.pb.types_pb2", "from halfmoon import errors", True),
        ("halfmoon.policy.placement.place", "from halfmoon.kv.keys import KEY_BYTES", True),
        ("halfmoon.sim.cluster.cluster_spec", "from halfmoon.policy.placement.place import place", False),
        ("halfmoon.sim.cluster.cluster_spec", "from halfmoon.engine.request import X", True),
        ("halfmoon.engine.engine", "from halfmoon.rpc.peer import Peer", True),
        ("halfmoon.worker.main", "from halfmoon.engine.engine import Engine", False),
        ("halfmoon.worker.main", "from halfmoon.ledger import models", True),
        ("halfmoon.rpc.peer", "from halfmoon.worker import main", True),
        ("services.gateway.app", "from services.kvstore.store import BlockStore", True),
        ("services.gateway.app", "from services import kvstore", True),
        ("services.gateway.app", "from .relay import Relay", False),
        ("services.gateway.app", "from ..kvstore import store", True),
        ("services.gateway.app", "from halfmoon.cli.app import app", True),
        ("services.prefill.__main__", "from halfmoon.worker.main import run", False),
        ("console.app", "from halfmoon.rpc.context import request_id", False),
        ("console.app", "from halfmoon.errors import NotFound", True),
        ("halfmoon.cli.app", "from halfmoon.sim import clock", False),
        ("halfmoon.cli.app", "from halfmoon.up.run import Up", False),
        ("halfmoon.cli.app", "import services.gateway", True),
        ("halfmoon.rpc.peer", "from halfmoon.up.supervision.supervisor import X", True),
    ],
)
def test_the_checker_can_fail(module: str, source: str, is_violation: bool) -> None:
    assert bool(violations(module, source)) == is_violation


def shelf_violations(module: str, source: str) -> list[str]:
    """What a module of `halfmoon.policy` imports against the order of its shelves."""

    def rank(name: str) -> int | None:
        parts = name.split(".")
        is_in_shelf = parts[:2] == ["halfmoon", "policy"] and len(parts) > 2 and parts[2] in POLICY_SHELVES
        return POLICY_SHELVES.index(parts[2]) if is_in_shelf else None

    own = rank(module)
    if own is None:
        return []
    imported = ((name, rank(name)) for name in imported_modules(module, source))
    return [f"{module} imports {name}" for name, shelf in imported if shelf is not None and shelf > own]


def test_the_shelves_of_policy_import_one_way() -> None:
    files = sorted((ROOT / "halfmoon/policy").rglob("*.py"))
    assert [found for file in files for found in shelf_violations(module_name(file), file.read_text())] == []
    wrong = "from halfmoon.policy.placement.place import place"
    assert shelf_violations("halfmoon.policy.forecast.ttft", wrong)
    assert not shelf_violations("halfmoon.policy.admission.refusal", wrong)
    assert not shelf_violations("halfmoon.policy.retries", wrong)


def import_graph(sources: Mapping[str, str], packages: Collection[str] = ()) -> dict[str, set[str]]:
    """The files that each file names in its imports; `if TYPE_CHECKING` and functions count, too."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        parents = module.split(".") if module in packages else module.split(".")[:-1]
        graph[module] = set()
        for node in ast.walk(ast.parse(source)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = parents[: len(parents) - node.level + 1] if node.level else []
                origin = ".".join([*base, *([node.module] if node.module else [])])
                names = [
                    full if (full := f"{origin}.{alias.name}") in sources else origin for alias in node.names
                ]  # `from room import file` names the file
            graph[module] |= {name for name in names if name in sources and name != module}
    return graph


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of files that reach each other (strongly connected components of more than one)."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        pass
    else:
        return []
    found = {frozenset(other for other in _reached(graph, name) if name in _reached(graph, other)) for name in graph}
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def _reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    reached: set[str] = set()
    stack = [start]
    while stack:
        new = set(graph[stack.pop()]) - reached
        reached |= new
        stack += new
    return reached


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {module_name(file): file for file in our_files() if file.parent.name != "pb"}
    packages = [name for name, file in files.items() if file.name == "__init__.py"]
    assert circles(import_graph({name: file.read_text() for name, file in files.items()}, packages)) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import b", "b": "import c", "c": ""}, []),
        ({"a": "import b", "b": "def f():\n    import a", "c": "import a"}, [["a", "b"]]),
        ({"a.x": "from a.y import Y", "a.y": "if TYPE_CHECKING:\n    from a import x"}, [["a.x", "a.y"]]),
        ({"a.x": "from . import y", "a.y": "from .z import Z", "a.z": "from a.x import X"}, [["a.x", "a.y", "a.z"]]),
        ({"a.x": "from ..b.y import Y", "b.y": "import numpy"}, []),
    ],
)
def test_the_circle_check_can_fail(sources: dict[str, str], expected: list[list[str]]) -> None:
    assert circles(import_graph(sources)) == expected


def _import_all(unwanted: str, modules: list[str], *paths: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    command = [sys.executable, "-c", IMPORT_ALL, unwanted, *modules]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_what_needs_no_torch_imports_none() -> None:
    files = [file for package in TORCH_FREE_PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    files += [ROOT / name for name in TORCH_FREE_FILES]
    done = _import_all("torch", [module_name(file) for file in files])
    assert done.returncode == 0, done.stderr


def test_commands_start_without_what_only_the_ledger_needs() -> None:
    done = _import_all("sqlalchemy", ["halfmoon.cli.app"])
    assert done.returncode == 0, done.stderr


def test_the_torch_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "innocent.py").write_text("import json\n")
    (tmp_path / "offender.py").write_text("def f() -> None: ...\nimport torch\n")
    assert _import_all("torch", ["innocent"], tmp_path).returncode == 0
    done = _import_all("torch", ["innocent", "offender"], tmp_path)
    assert (done.returncode, done.stderr.strip()) == (1, "offender imports torch")


@pytest.mark.skipif(find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_generated_code_is_current() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "scripts/proto", "--check"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
