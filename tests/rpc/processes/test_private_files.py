"""Nobody else on the host reads what services write."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from halfmoon.rpc.processes.private_files import kept_private, make_private, write_private


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("survives_crash", [True, False])
def test_a_file_is_replaced_whole_and_for_its_owner_alone(tmp_path: Path, survives_crash: bool) -> None:
    file = tmp_path / "file"
    file.write_text("what others could read")
    file.chmod(0o644)
    with file.open() as reader:
        write_private(file, b"new", survives_crash=survives_crash)
        assert reader.read() == "what others could read"
    assert (file.read_bytes(), mode(file), list(tmp_path.iterdir())) == (b"new", 0o600, [file])


def test_what_cannot_be_written_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.write_text("old")
    directory.mkdir()
    with pytest.raises(FileExistsError):
        write_private(file, b"new", replaces=False)
    with pytest.raises(IsADirectoryError):
        write_private(directory, b"new")
    assert (sorted(tmp_path.iterdir()), file.read_text()) == ([directory, file], "old")


def test_what_is_kept_is_made_once_whoever_comes_first(tmp_path: Path) -> None:
    kept: list[bytes] = []
    starts = [threading.Thread(target=lambda: kept.append(kept_private(tmp_path / "key", lambda: os.urandom(32))))
              for _ in range(8)]  # fmt: skip
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert (len(kept), len(set(kept)), mode(tmp_path / "key")) == (8, 1, 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A state directory as earlier versions left it."""
    state = tmp_path / "state"
    for directory in (state, state / "logs", state / "kvstore"):
        directory.mkdir()
        directory.chmod(0o755)
    for name in ("ledger.db", "ledger.db-wal", "classes-1.json", "stores", "logs/gateway.log"):
        (state / name).touch()
        (state / name).chmod(0o644)
    return state


def test_what_earlier_versions_left_is_mended_once(state_dir: Path) -> None:
    assert make_private(state_dir) == 8
    assert {mode(path) for path in (state_dir, *state_dir.rglob("*")) if path.is_dir()} == {0o700}
    assert {mode(path) for path in state_dir.rglob("*") if path.is_file()} == {0o600}
    assert make_private(state_dir) == 0


def test_files_that_are_not_ours_are_left_alone(state_dir: Path, tmp_path: Path) -> None:
    mine, target = state_dir / "notes.txt", tmp_path / "target"
    for path in (mine, target):
        path.touch()
        path.chmod(0o644)
    (state_dir / "logs" / "link").symlink_to(target)
    make_private(state_dir)
    assert (mode(mine), mode(target)) == (0o644, 0o644)


def test_a_directory_without_anything_of_ours_or_shared_by_users_keeps_its_mode(
    state_dir: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    empty.chmod(0o755)
    state_dir.chmod(0o1777)
    assert make_private(empty) == 0
    make_private(state_dir)
    assert (mode(empty), state_dir.stat().st_mode & 0o7777) == (0o755, 0o1777)


def test_a_service_writes_private_files_whatever_the_umask(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from halfmoon.rpc.service import service_main, service_config\n"
        "from pydantic_settings import BaseSettings\n"
        "class Settings(BaseSettings):\n"
        "    model_config = service_config('gateway')\n"
        "    state_dir: Path = Path('.')\n"
        "async def serve(settings): (settings.state_dir / 'file').touch()\n"
        "service_main('gateway', Settings, serve)\n"
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFMOON_")}
    ran = subprocess.run(
        [sys.executable, "-c", program, "--state-dir", str(tmp_path)],
        env=environment, capture_output=True, text=True, check=True, umask=0,
    )  # fmt: skip
    assert (mode(tmp_path / "file"), mode(tmp_path / "logs")) == (0o600, 0o700)
    assert "state.made_private" in ran.stderr
