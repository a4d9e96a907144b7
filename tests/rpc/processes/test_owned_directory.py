"""Temporary directories of processes that live, that ended, and that were killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from halfmoon.rpc.processes.owned_directory import owned_directory

OWN_AND_WAIT = (
    "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
    "from halfmoon.rpc.processes.owned_directory import owned_directory\n"
    "with owned_directory('up') as directory:\n"
    "    (directory / 'fleet').touch(); print(directory, flush=True); sys.stdin.read()\n"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories are made here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_goes_with_the_block(temporary: Path) -> None:
    with owned_directory("up") as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert list(temporary.iterdir()) == [directory]
    assert list(temporary.iterdir()) == []


def test_the_next_one_removes_those_whose_owner_was_killed_and_no_other(temporary: Path) -> None:
    (temporary / "halfmoon-of-somebody-else").mkdir()
    command = [sys.executable, "-c", OWN_AND_WAIT, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with owned_directory("planner"):
            assert (left / "fleet").exists()
        owner.kill()
        owner.wait()
        assert left.exists()
        with owned_directory("planner"):
            assert not left.exists()
    assert [path.name for path in temporary.iterdir()] == ["halfmoon-of-somebody-else"]
