"""Files of packed weights: found whole or not at all, in a private directory, the oldest dropped."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from halfmoon.engine.native.weight_file import Memory, WeightFiles

PIECES: list[tuple[str, str, tuple[int, ...], Memory]] = [
    ("", "-1", (3, 5), np.arange(60, dtype=np.uint8)),
    ("norm", "torch.float32", (2,), np.arange(8, dtype=np.uint8)),
    ("none", "0", (0,), np.empty(0, np.uint8)),
]


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return WeightFiles(tmp_path / "prepared")


def file_of(files: WeightFiles, key: str) -> Path:
    return files.lock_file(key).with_name(f"{key}.weights")


def test_what_was_written_is_mapped(files: WeightFiles) -> None:
    assert files.find("a") is None
    assert files.write("a", PIECES)
    found = files.find("a")
    assert found is not None
    for part, (name, kind, shape, memory) in zip(found.parts, PIECES, strict=True):
        assert (part.name, part.kind, part.shape) == (name, kind, shape)
        mapped = found.memory(part)
        assert mapped.tobytes() == memory.tobytes()
        assert not mapped.flags.writeable
        assert mapped.nbytes == 0 or mapped.ctypes.data % 64 == 0
    assert file_of(files, "a").stat().st_mode & 0o777 == 0o600


def test_a_cut_changed_or_foreign_file_is_not_used(files: WeightFiles) -> None:
    assert files.write("a", PIECES)
    path = file_of(files, "a")
    whole = path.read_bytes()
    for content in (
        b"",
        whole[:20],
        whole[:100],
        whole[:-1],
        whole + b"0",
        b"X" + whole[1:],
        whole[:40] + b"!" + whole[41:],
    ):
        path.write_bytes(content)
        assert files.find("a") is None
    path.write_bytes(whole)
    assert files.find("a") is not None
    file_of(files, "b").write_bytes(whole)
    file_of(files, "b").chmod(0o600)
    assert files.find("b") is None  # its header has another key
    path.chmod(0o620)
    assert files.find("a") is None  # others may write to it


def test_a_file_that_cannot_be_marked_as_used_is_used(files: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "read-only file system", path)

    assert files.write("a", PIECES)
    monkeypatch.setattr(os, "utime", refuse)
    assert files.find("a") is not None


def test_a_link_is_not_followed(files: WeightFiles) -> None:
    assert files.write("a", PIECES)
    moved = file_of(files, "a").rename(file_of(files, "a").with_name("elsewhere"))
    file_of(files, "a").symlink_to(moved)
    assert files.find("a") is None


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        WeightFiles(shared)
    link = tmp_path / "link"
    link.symlink_to(WeightFiles(tmp_path / "own").lock_file("a").parent)
    with pytest.raises(PermissionError):
        WeightFiles(link)


def test_files_used_longest_ago_are_dropped(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path / "prepared")
    for age, key in enumerate("cba", 1):
        assert files.write(key, PIECES)
        os.utime(file_of(files, key), (age, age))
    mapped = files.find("c")  # used now
    one = file_of(files, "a").stat().st_size
    small = WeightFiles(tmp_path / "prepared", most_bytes=2 * one + one // 2)
    assert small.write("d", PIECES)
    assert [key for key in "abcd" if small.find(key) is not None] == ["c", "d"]
    assert mapped is not None
    assert WeightFiles(tmp_path / "prepared", most_bytes=one - 1).write("e", PIECES) is False


def test_a_draft_left_by_a_dead_process_is_removed(files: WeightFiles) -> None:
    draft = files.lock_file("a").with_name(".x.1.draft")
    draft.write_bytes(b"half")
    assert files.write("a", PIECES)
    assert draft.exists()  # somebody may be writing it
    os.utime(draft, (1, 1))
    assert files.write("b", PIECES)
    assert not draft.exists()
