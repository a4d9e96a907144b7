"""The kernels are compiled once, by whatever compiler there is, and its absence is told."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from halfmoon.engine.native import compiler
from halfmoon.engine.native.compiler import compiled
from halfmoon.errors import Incompatible


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    fake = f'echo run >> {count}; while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    monkeypatch.setenv("CC", script(tmp_path / "fake-cc", fake))
    first, second = compiled(tmp_path / "cache"), compiled(tmp_path / "cache")
    assert first == second
    assert first.read_text() == "made\n"
    assert count.read_text() == "run\n"
    assert list(first.parent.iterdir()) == [first]  # nothing half-made is left


def test_another_compiler_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("CC", script(tmp_path / name, 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'))
        made.append(compiled(tmp_path / "cache"))
    assert made[0] != made[1]


def test_each_kind_of_processor_has_its_option_and_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/cpuinfo stays the same, as under emulation."""
    options = tmp_path / "options"
    fake = f'echo "$@" >> {options}; while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    monkeypatch.setenv("CC", script(tmp_path / "fake-cc", fake))
    made = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        made.append(compiled(tmp_path / "cache"))
    assert made[0] != made[1]
    on_x86, on_arm = options.read_text().splitlines()
    assert "-march=native" in on_x86
    assert "-mcpu=native" in on_arm  # clang 14 refuses the other there
    assert "-march" not in on_arm


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "fake-cc", "echo no room on this disk >&2; exit 1"))
    with pytest.raises(Incompatible, match="no room on this disk"):
        compiled(tmp_path / "cache")


def test_a_compiler_that_hangs_ends_with_its_own_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 1)
    monkeypatch.setenv("CC", script(tmp_path / "fake-cc", f"sleep 999 & echo $! >> {pids}; wait"))
    with pytest.raises(Incompatible, match="timed out"):
        compiled(tmp_path / "cache")
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pids.read_text())).wait(timeout=60)


def test_a_cache_that_nothing_can_be_put_into_is_told(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("a file is no directory, not even for root")
    with pytest.raises(Incompatible, match="could not be compiled"):
        compiled(occupied)


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(Incompatible, match="install gcc or clang"):
        compiled(tmp_path / "cache")


def test_a_compiler_that_cannot_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "cc", "echo no headers >&2; exit 1")
    script(tmp_path / "gcc", 'while [ "$1" != -o ]; do shift; done; echo made > "$2"')
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled(tmp_path / "cache").read_text() == "made\n"


def test_a_compiler_that_was_named_and_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "my-cc"))
    with pytest.raises(Incompatible, match="my-cc"):
        compiled(tmp_path / "cache")
