"""Files that their owner alone reads: logs and the ledger hold what clients sent, others are secrets."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PRIVATE_UMASK = 0o077  # of every service: new files are 0600, new directories 0700

_OTHERS = 0o077
# What services write there. A state directory may be any directory, so what else it holds is left alone.
_OURS = (
    *(
        "logs",
        "profiles",
        "kvstore",
        "simulated-model",
        "stores",
        "prometheus-targets.json",
        "cluster_secret",
        "operator_token",
        "label_key",
    ),
    *("ledger.db*", "classes-*.json", "tenants-*.json"),
)


def write_private(
    file: Path, content: bytes, mode: int = 0o600, *, replaces: bool = True, survives_crash: bool = True
) -> None:
    """Writes the whole file or nothing: whoever reads it meanwhile gets the old content or the new.

    `survives_crash`: waits for the device. Raises OSError; it is FileExistsError if the file is there and this does not
    replace.
    """
    draft = file.parent / f".{file.name}.{secrets.token_hex(4)}"
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            out.write(content)
            if survives_crash:
                out.flush()
                os.fsync(out.fileno())
        if replaces:
            draft.replace(file)
        else:
            file.hardlink_to(draft)
    finally:
        with suppress(OSError):
            draft.unlink()


def kept_private(file: Path, make: Callable[[], bytes]) -> bytes:
    """Returns the file's content, which is made at the first call. Raises OSError.

    Of several processes at once, all get the content of one.
    """
    with suppress(FileExistsError):
        if not file.exists():
            write_private(file, make(), replaces=False)
    return file.read_bytes()


def make_private(state_dir: Path) -> int:
    """Takes from other users what earlier versions let them read. Returns the number of files and directories changed.

    Those that belong to somebody else are left as they are.
    """
    return sum(_changed(path) for path in _written_by_us(state_dir))


def _written_by_us(state_dir: Path) -> Iterator[Path]:
    """Yields the directory itself, unless it is shared or nothing of ours is in it, and what services wrote there."""
    state_dir = state_dir.resolve()
    found = [path for pattern in _OURS for path in state_dir.glob(pattern)]
    if found and not state_dir.stat().st_mode & stat.S_ISVTX:
        yield state_dir
    for path in found:
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.rglob("*")


def _changed(path: Path) -> bool:
    with suppress(OSError):
        mode = path.lstat().st_mode
        if mode & _OTHERS and not stat.S_ISLNK(mode):
            os.chmod(path, stat.S_IMODE(mode) & ~_OTHERS, follow_symlinks=True)
            return True
    return False
