"""A state directory has one `halfmoon up` at a time."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from halfmoon.errors import InvalidRequest
from halfmoon.up.run import up
from halfmoon.up.state.state_lock import locked_state_dir
from halfmoon.up.up_options import UpOptions


def test_a_second_one_is_told_which_process_has_it(tmp_path: Path) -> None:
    with (
        locked_state_dir(tmp_path),
        pytest.raises(InvalidRequest, match=f"process {os.getpid()}"),
        locked_state_dir(tmp_path),
    ):
        raise AssertionError
    with locked_state_dir(tmp_path):
        assert (tmp_path / "up.lock").stat().st_mode & 0o777 == 0o600


async def test_a_second_halfmoon_up_starts_nothing(tmp_path: Path) -> None:
    with locked_state_dir(tmp_path), pytest.raises(InvalidRequest, match="another `halfmoon up`"):
        await up(UpOptions(state_dir=tmp_path), Console(file=io.StringIO()))
    assert not (tmp_path / "cluster_secret").exists()


def test_where_there_are_no_locks_it_starts_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked_state_dir(tmp_path):
        pass


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "up.lock").mkdir()
    with pytest.raises(InvalidRequest, match="cannot be used"), locked_state_dir(tmp_path):
        raise AssertionError
