"""Temporary directories that go with their process, or, if it was killed, when the next one is made."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "halfmoon-"
_UNFINISHED_PREFIX = ".halfmoon-new-"
_LOCK = ".owner"  # locked by the owner for as long as it lives: the kernel ends a lock with its process


@contextmanager
def owned_directory(kind: str) -> Iterator[Path]:
    """Makes a directory that only this user can enter, with a path short enough for a Unix socket in it.

    Removes directories of this user whose owners died. Raises OSError if there is no room for a directory.
    """
    parent = Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX, dir=parent))
    lock = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Nobody sees it under its name before it is locked.
        directory = unfinished.rename(parent / f"{_PREFIX}{kind}-{unfinished.name.removeprefix(_UNFINISHED_PREFIX)}")
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), _claimed(directory):
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """Locks a directory of this user that nobody owns. Raises OSError for any other."""
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
