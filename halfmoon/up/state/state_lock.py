"""One `halfmoon up` at a time has a state directory: two would write one store's files and each other's logs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halfmoon.errors import InvalidRequest

_FILE = "up.lock"  # holds the process's id; the kernel ends the lock with the process


@contextmanager
def locked_state_dir(directory: Path) -> Iterator[None]:
    """Inside the block, no other `halfmoon up` uses the directory, if its file system has locks.

    Raises InvalidRequest if another one does, or if nothing can be written there.
    """
    try:
        lock = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidRequest(f"--state-dir {directory} cannot be used: {error.strerror}") from error
    try:
        _take(lock, directory)
        yield
    finally:
        os.close(lock)


def is_locked(directory: Path) -> bool:
    """Returns whether a `halfmoon up` uses the directory now."""
    try:
        with (directory / _FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _take(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = os.read(lock, 20).decode(errors="replace").strip()
        raise InvalidRequest(
            f"another `halfmoon up` (process {process}) uses --state-dir {directory}: stop it, or give another"
        ) from None
    except OSError:  # a file system without locks
        return
    with suppress(OSError):  # no room: the lock holds without a name, too
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
