"""Files of packed weights that processes of one host map, so that they share the memory and need not pack again.

A file is written under another name, brought to the device and renamed. Its header has a digest, its key and its size,
so a cut or foreign file is never used. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Memory = np.ndarray[Any, np.dtype[np.uint8]]  # [num_bytes]

MOST_BYTES = 64 << 30  # of all files in a directory; those that were used last stay
_MAGIC = b"HMPACK01"
_PREFIX = struct.Struct("<8sQ16s")  # magic, bytes of the header, digest of the header
_ALIGNMENT = 64  # a cache line, which the kernels' loads do not cross
_LEFT_FREE = 2  # a file needs this many times its size on the device, so that the device is never filled
_DRAFT_LIVES_S = 24 * 3600.0  # of a process that died while it wrote


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a file: what it is called, what it is, and where its bytes are."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class WeightFiles:
    """Owns a directory of weight files, which nobody else may write to."""

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES) -> None:
        """Makes the directory if it is missing. Raises OSError if others own it or may enter it."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{directory} is not a directory that its owner alone may enter (chmod 700)")
        self._directory = directory
        self._most_bytes = most_bytes

    def lock_file(self, key: str) -> Path:
        """The file whose lock a process holds while it writes `key`."""
        return self._directory / f".{key}.lock"

    def find(self, key: str) -> WeightFile | None:
        """The file with this key, mapped; None if there is none, or not a whole one of ours."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if not is_ours or status.st_size < _PREFIX.size:
                return None
            mapped = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        header = _read_header(mapped, key)
        if header is None:
            return None
        with suppress(OSError):  # it was dropped just now, or the directory cannot be written to
            os.utime(path)  # it was used
        return WeightFile(header, np.frombuffer(mapped, np.uint8))

    def write(self, key: str, pieces: Sequence[tuple[str, str, tuple[int, ...], Memory]]) -> bool:
        """Keeps pieces (name, kind, shape, bytes), then drops the files used longest ago; False if there is no room.

        Raises OSError.
        """
        offset, parts = 0, []
        for name, kind, shape, memory in pieces:
            parts.append(Part(name, kind, shape, offset, memory.nbytes))
            offset += _aligned(memory.nbytes)
        header = json.dumps({"key": key, "data_bytes": offset, "parts": [asdict(part) for part in parts]}).encode()
        prefix = _PREFIX.pack(_MAGIC, len(header), _digest(header))
        total_bytes = _aligned(len(prefix) + len(header)) + offset
        free_bytes = shutil.disk_usage(self._directory).free
        if total_bytes > self._most_bytes or _LEFT_FREE * total_bytes > free_bytes:
            return False
        draft = self._directory / f".{key}.{os.getpid()}.draft"
        draft.unlink(missing_ok=True)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                for content in (np.frombuffer(prefix + header, np.uint8), *(memory for *_, memory in pieces)):
                    out.write(content.data)
                    out.write(bytes(_aligned(content.nbytes) - content.nbytes))
                out.flush()
                os.fsync(out.fileno())
            draft.replace(self._path(key))
        finally:
            draft.unlink(missing_ok=True)
        self._drop_old(key)
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.weights"

    def _drop_old(self, newest: str) -> None:
        """Processes that have mapped a dropped file keep it."""
        for draft in self._directory.glob(".*.draft"):
            if time.time() - _status(draft)[0] > _DRAFT_LIVES_S:
                draft.unlink(missing_ok=True)
        kept_bytes = 0
        files = sorted(self._directory.glob("*.weights"), key=_status, reverse=True)
        for path in sorted(files, key=lambda path: path != self._path(newest)):
            kept_bytes += _status(path)[1]
            if kept_bytes > self._most_bytes:
                path.unlink(missing_ok=True)


class WeightFile:
    """Owns a mapped file. Its memory cannot be written to."""

    def __init__(self, header: Header, mapped: Memory) -> None:
        self.parts = header.parts
        self._data = mapped[header.data_start :]

    def memory(self, part: Part) -> Memory:
        """The bytes of a part, which keep the file mapped."""
        return self._data[part.offset : part.offset + part.num_bytes]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file has, and where its data begins."""

    parts: tuple[Part, ...]
    data_start: int


def _read_header(mapped: mmap.mmap, key: str) -> Header | None:
    magic, header_bytes, digest = _PREFIX.unpack_from(mapped)
    text = mapped[_PREFIX.size : _PREFIX.size + header_bytes] if header_bytes < len(mapped) else b""
    if magic != _MAGIC or _digest(text) != digest:
        return None
    header = json.loads(text)
    data_start = _aligned(_PREFIX.size + header_bytes)
    if header["key"] != key or data_start + header["data_bytes"] != len(mapped):
        return None
    return Header(tuple(Part(**{**part, "shape": tuple(part["shape"])}) for part in header["parts"]), data_start)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=16).digest()


def _status(path: Path) -> tuple[float, int]:
    """When a file was last used, and its size; zeros if another process has just dropped it."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size
