"""Append-only files of records. Blocking calls: for one writing thread and any number of readers."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfmoon.kv.kv_layout import KVBytes

_SUFFIX = ".blocks"
_NAMES = "[0-9]" * 8 + _SUFFIX


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Location of a record."""

    segment: int
    offset: int
    num_bytes: int


class SegmentFiles:
    """Owns the files of a directory, which it locks, and their sizes. Knows nothing of their content or its use.

    Only the process that began a file appends to it. What a killed process left after its last known record is cut off.
    """

    def __init__(self, directory: Path, segment_bytes: int, first: int = 1) -> None:
        """first: least number of a new file. Raises OSError if the directory cannot be used or is in use."""
        _make(directory)
        self._directory = directory
        self._lock = _locked(directory)
        try:
            self._identity = _identity(self._lock)
            self._sizes = {int(path.stem): path.stat().st_size for path in directory.glob(_NAMES)}
        except OSError:
            self._unlock()
            raise
        self.segment_bytes = segment_bytes  # a file that has reached it is followed by another one
        self._active = max(first, max(self._sizes, default=0) + 1)
        self._file = -1  # descriptor of the active segment, once begun

    def sizes(self) -> dict[int, int]:
        """Bytes of each file by its number, including the active one."""
        return dict(self._sizes)

    @property
    def active(self) -> int:
        """Number of the file that is appended to."""
        return self._active

    @property
    def device(self) -> int:
        """The file system of the directory."""
        return self._identity[0]

    def are_here(self) -> bool:
        """Whether the directory is still the one that was opened. Raises OSError if that cannot be told."""
        try:
            return _identity(self._directory) == self._identity
        except FileNotFoundError:
            return False

    def missing(self) -> list[int]:
        """Numbers of files that somebody else has removed. Raises OSError."""
        there = set(os.listdir(self._directory))
        return [segment for segment in self._sizes if self._path(segment).name not in there]

    def append(self, records: Sequence[Sequence[KVBytes]]) -> list[Location]:
        """Writes records, each given in parts, and syncs them to the device: all, or none and raises OSError."""
        if not records:
            return []
        begun: list[tuple[int, int]] = [(self._active, self._sizes.get(self._active, 0))]
        places = []
        try:
            for parts in records:
                if self._sizes.get(self._active, 0) >= self.segment_bytes:
                    self._seal()
                    begun.append((self._active, 0))
                places.append(self._append(parts))
            os.fdatasync(self._file)
        except OSError:
            self._undo(begun)
            raise
        return places

    def read(self, place: Location) -> bytes:
        """Reads the bytes there; fewer if the file is shorter. Raises OSError, FileNotFoundError for a removed file."""
        file = os.open(self._path(place.segment), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, place.num_bytes, place.offset)
        finally:
            os.close(file)

    def truncate(self, segment: int, num_bytes: int) -> None:
        """Cuts off what lies after the last record of a file that is not appended to."""
        os.truncate(self._path(segment), num_bytes)
        self._sizes[segment] = num_bytes

    def remove(self, segment: int) -> None:
        """Deletes a file; readers that have it open can finish."""
        if segment == self._active:
            self._seal()
        self._path(segment).unlink(missing_ok=True)
        self._sizes.pop(segment, None)

    def close(self) -> None:
        """Ends the use of the files, and the lock."""
        self._seal()
        self._unlock()

    def abandon(self) -> None:
        """Ends the use of files that may be gone, and the lock."""
        self._leave()
        self._unlock()

    def _append(self, parts: Sequence[KVBytes]) -> Location:
        if self._file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path(self._active), flags, 0o600)
            os.fchmod(self._file, 0o600)  # whatever the umask
            self._sizes[self._active] = 0
        offset = self._sizes[self._active]
        views = [memoryview(part).cast("B") for part in parts]
        num_bytes = sum(view.nbytes for view in views)
        for view in views:
            while view.nbytes:
                view = view[os.write(self._file, view) :]
        self._sizes[self._active] += num_bytes
        return Location(self._active, offset, num_bytes)

    def _seal(self) -> None:
        if self._file >= 0:
            os.fdatasync(self._file)
            self._leave()

    def _leave(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._active += 1

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _undo(self, begun: Sequence[tuple[int, int]]) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        for segment, num_bytes in begun:
            if num_bytes:
                self.truncate(segment, num_bytes)
            else:
                self._path(segment).unlink(missing_ok=True)
                self._sizes.pop(segment, None)
        self._active += 1  # numbers are never reused: a reader may be about to open the file that had it

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08}{_SUFFIX}"


def _make(directory: Path) -> None:
    """Makes a directory that is its owner's alone, whatever the umask; one that is there stays as it is."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise
        return
    directory.chmod(0o700)


def _locked(directory: Path) -> int:
    """A descriptor that keeps other stores out, which would take the files for rubbish of a dead one."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OSError(errno.EBUSY, "another store uses it: give each store a directory of its own") from None
    except OSError:  # a file system without locks
        pass
    return lock


def _identity(directory: Path | int) -> tuple[int, int]:
    stat = os.stat(directory)
    return stat.st_dev, stat.st_ino
