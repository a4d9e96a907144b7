"""GGUF files as directories of Hugging Face's format, made once for all processes that share a cache. Torch-free."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from halfmoon.errors import Incompatible, InvalidRequest

_CONVERTED_AS = b"blocks of 3 to 8 bits apart"  # part of a converted directory's name: other content, other name
_WITH_NUMBERS = "-with-numbers"  # ends the name if all weights are in safetensors, too
ELSEWHERE = "set HALFMOON_CACHE_DIR to a directory of a larger file system"
_FULL = tuple(f"os error {number}" for number in (errno.ENOSPC, errno.EDQUOT))  # as safetensors tells it
_FULL += tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))

Announce = Callable[[str], None]


def default_cache_dir() -> Path:
    """The directory of converted models: `HALFMOON_CACHE_DIR`, else `~/.cache/halfmoon`. Raises InvalidRequest."""
    return expanded(os.environ.get("HALFMOON_CACHE_DIR") or "~/.cache/halfmoon", "HALFMOON_CACHE_DIR")


def expanded(path: str, param: str) -> Path:
    """The path with a leading ~ or ~USER written out. Raises InvalidRequest for a user that there is not."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{param}: {path} names a user whom this host does not know", param=param) from error


def converted(file: Path, cache_dir: Path | None, announce: Announce, as_numbers: bool) -> Path:
    """The directory converted from a GGUF file: made once, whole or not at all, even with concurrent callers.

    Without `as_numbers`, one that has numbers, too, is also returned if it is there: not every gateway can convert.
    """
    models = (cache_dir or default_cache_dir()) / "models"
    blocks = models / f"{file.stem}-{_file_digest(file)}"
    numbers = blocks.with_name(blocks.name + _WITH_NUMBERS)
    target = numbers if as_numbers else blocks
    for made in (target, numbers):
        if os.path.isdir(made):  # `Path.is_dir` raises for a name that is too long
            return made
    _make_writable(models)
    with locked(models / f".{target.name}.lock") as alone:
        if not target.is_dir():
            if alone:
                _remove_partial(target)
            announce(f"converting {file.name} (once)")
            _convert(file, target, as_numbers)
    return target


def _make_writable(models: Path) -> None:
    """Makes the directory. Raises Incompatible if nothing can be written there."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=models):
            pass
    except OSError as error:
        raise Incompatible(
            f"converted models are kept in {models}, which cannot be written to ({error.strerror}): set "
            "HALFMOON_CACHE_DIR to a directory that can",
            param="model",
        ) from error


def _remove_partial(target: Path) -> None:
    """Removes leftovers of killed processes, one of which may have had our process id."""
    for path in target.parent.iterdir():
        if path.name.startswith(f".{target.name}.") and path.is_dir():
            shutil.rmtree(path)


def _convert(file: Path, target: Path, as_numbers: bool) -> None:
    if find_spec("gguf") is None:
        raise Incompatible(
            f"GGUF files are not read here, and no worker has converted {file.name} into {target}; give the directory "
            "that `python -m halfmoon.engine.checkpoint.description FILE DIRECTORY` makes elsewhere",
            param="model",
        )
    command = [sys.executable, "-m", "halfmoon.engine.checkpoint.convert_gguf", str(file), str(target)]
    command += ["numbers"] if as_numbers else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
        advice = "" if "Incompatible" in last_line else "; if it is damaged or cut off, get it again"
        if any(sign in last_line for sign in _FULL):
            advice = f"; make room in {target.parent}, or {ELSEWHERE}"
        reason = last_line.removeprefix(f"{Incompatible.__module__}.{Incompatible.__qualname__}: ")
        raise Incompatible(f"{file.name} could not be converted: {reason}{advice}", param="model")


def _file_digest(file: Path) -> str:
    """Names a GGUF file by size and by its first and last MiB: the header, all names and some weights."""
    hasher = hashlib.blake2b(_CONVERTED_AS, digest_size=6)
    size = file.stat().st_size
    with file.open("rb") as stream:
        hasher.update(struct.pack("<Q", size) + stream.read(1 << 20))
        stream.seek(max(size - (1 << 20), 0))
        hasher.update(stream.read())
    return hasher.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lets one process in at a time; yields whether the lock is held. Without `fcntl` two processes may be in.

    What they make is renamed when it is whole, so even then the result is. Its file stays, unless what is done fails.
    """
    with ExitStack() as stack:
        while True:
            stream = stack.enter_context(path.open("w"))
            try:
                import fcntl

                fcntl.flock(stream, fcntl.LOCK_EX)
                alone = True
            except ImportError:
                alone = False
            if not alone or _is_at(stream, path):
                break  # else another that failed has removed the file meanwhile
        try:
            yield alone
        except BaseException:
            if alone:
                with suppress(OSError):  # what failed may be the file system
                    path.unlink()
            raise


def _is_at(stream: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False
