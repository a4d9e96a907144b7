"""The log files of services: bounded by rotation, and never an error where the disk is full."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

DEFAULT_LOG_BYTES = 64 << 20
DEFAULT_LOG_FILES = 3

OnTrouble = Callable[[str], None]  # gets a sentence for the terminal
Opener = Callable[[Path], io.RawIOBase]


class LogLimits(NamedTuple):
    """The size of a log file and the number of files of each service, the one being written included."""

    max_bytes: int = DEFAULT_LOG_BYTES
    num_files: int = DEFAULT_LOG_FILES


def open_append(path: Path) -> io.RawIOBase:
    """Opens a file without a buffer: when `write` returns, the line is with the system, or refused."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


class LogFiles:
    """Owns the log files of a directory, one for each service.

    `on_trouble` is called when lines begin to be dropped, and with their number when every file is written again.
    """

    def __init__(
        self,
        directory: Path,
        limits: LogLimits = LogLimits(),  # noqa: B008 (immutable)
        on_trouble: OnTrouble = lambda sentence: None,
        opener: Opener = open_append,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._on_trouble = on_trouble
        self._open = opener
        self._files: dict[str, LogFile] = {}
        self._num_dropped = 0

    def file(self, service: str) -> LogFile:
        """Returns the file of a service, the same at every call."""
        path = self._directory / f"{service}.log"
        return self._files.setdefault(service, LogFile(path, self._limits, self._dropped, self._written, self._open))

    def _dropped(self, error: OSError) -> None:
        self._num_dropped += 1
        if self._num_dropped == 1:
            reason = error.strerror or str(error)
            self._on_trouble(f"logs in {self._directory} cannot be written and lose lines until they can: {reason}")

    def _written(self) -> None:
        if not any(file.num_dropped for file in self._files.values()):
            self._on_trouble(f"logs in {self._directory} are written again; {self._num_dropped} lines were dropped")
            self._num_dropped = 0


class LogFile:
    """Owns a service's log file, and the number of lines dropped since the last one that could be written.

    Older files are called `name.log.1`, the newest of them, `name.log.2` and so on.
    """

    def __init__(
        self,
        path: Path,
        limits: LogLimits,
        on_dropped: Callable[[OSError], None],
        on_written: Callable[[], None],
        opener: Opener = open_append,
    ) -> None:
        """Calls `on_dropped` for each dropped line, `on_written` for the first written after some."""
        self.path = path
        self.num_dropped = 0
        self._limits = limits
        self._on_dropped = on_dropped
        self._on_written = on_written
        self._open = opener
        self._file: io.RawIOBase | None = None
        self._num_bytes = 0
        self._is_torn = False  # whether the file ends in the middle of a line

    def write(self, line: bytes) -> None:
        """Appends a line, or drops it where the file cannot be written."""
        try:
            file = self._ready_for(len(line))
            if self.num_dropped:
                self._append(file, _report(self.num_dropped))
            self._append(file, line)
        except OSError as error:
            self.close()  # the next line opens the file again, which may have gone meanwhile
            self.num_dropped += 1
            self._on_dropped(error)
            return
        if self.num_dropped:
            self.num_dropped = 0
            self._on_written()

    def close(self) -> None:
        """Closes the file. A later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ready_for(self, num_bytes: int) -> io.RawIOBase:
        """Returns the open file, a fresh one if `num_bytes` more would exceed the limit. Raises OSError."""
        if self._file is None:
            self._file = self._open(self.path)
            self._num_bytes = self._file.tell()
        if self._num_bytes and self._num_bytes + num_bytes > self._limits.max_bytes:
            self.close()
            _rotate(self.path, self._limits.num_files)
            self._file = self._open(self.path)
            self._num_bytes = 0
        return self._file

    def _append(self, file: io.RawIOBase, line: bytes) -> None:
        """Writes a whole line. Raises OSError where there is room for nothing or for a part only."""
        whole = b"\n" + line if self._is_torn else line
        written = file.write(whole) or 0
        self._num_bytes += written
        if written:
            self._is_torn = not whole[:written].endswith(b"\n")
        if written < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _rotate(path: Path, num_files: int) -> None:
    """Renames `path` and its predecessors by one place; the oldest of `num_files` goes."""
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, num_files))]
    names[-1].unlink(missing_ok=True)
    for place in range(len(names) - 1, 0, -1):
        if names[place - 1].exists():
            names[place - 1].replace(names[place])


def _report(num_dropped: int) -> bytes:
    event = {"level": "WARNING", "logger": __name__, "event": "log.lines_dropped", "num_lines": num_dropped}
    return json.dumps(event).encode() + b"\n"
