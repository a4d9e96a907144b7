"""Log files on a disk with room, without room, and with room again."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path

from halfmoon.up.supervision.log_files import LogFile, LogFiles, LogLimits, open_append

LINE = b'{"event": "one"}\n'


class Disk:
    """Opens files that take `room` bytes in all."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path) -> io.RawIOBase:
        return _FileOnDisk(self, path)


class _FileOnDisk(io.FileIO):
    def __init__(self, disk: Disk, path: Path) -> None:
        super().__init__(path, "a")
        self._disk = disk

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self._disk.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: self._disk.room])
        self._disk.room -= written
        return written


def files(directory: Path, sentences: list[str], disk: Disk, limits: LogLimits = LogLimits()) -> LogFiles:  # noqa: B008
    return LogFiles(directory, limits, sentences.append, disk.open)


def test_lines_without_room_are_dropped_and_counted_and_told_once(tmp_path: Path) -> None:
    sentences: list[str] = []
    disk = Disk(room=len(LINE))
    logs = files(tmp_path, sentences, disk)
    first, second = logs.file("gateway"), logs.file("kvstore")
    for log in (first, first, second, first):
        log.write(LINE)
    assert len(sentences) == 1
    assert "No space left on device" in sentences[0]
    disk.room = 10_000
    first.write(LINE)
    assert len(sentences) == 1  # the other file is not written again yet
    second.write(LINE)
    first.close()
    second.close()
    assert "3 lines were dropped" in sentences[1]
    events = [json.loads(line) for line in (tmp_path / "gateway.log").read_text().splitlines()]
    assert [event["event"] for event in events] == ["one", "log.lines_dropped", "one"]
    assert events[1]["num_lines"] == 2


def test_a_torn_line_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    disk = Disk(room=len(LINE) + 5)
    log = files(tmp_path, [], disk).file("gateway")
    log.write(LINE)
    log.write(LINE)
    disk.room = 10_000
    log.write(LINE)
    log.close()
    lines = (tmp_path / "gateway.log").read_bytes().splitlines(keepends=True)
    assert (lines[0], lines[1], lines[-1]) == (LINE, LINE[:5] + b"\n", LINE)


def test_a_directory_that_cannot_be_made_is_a_full_disk_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentences: list[str] = []
    log = LogFiles(tmp_path / "file" / "logs", LogLimits(), sentences.append).file("gateway")
    log.write(LINE)
    assert (log.num_dropped, len(sentences)) == (1, 1)


def test_a_file_at_its_limit_is_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    log = files(tmp_path, [], Disk(10_000), LogLimits(max_bytes=2 * len(LINE), num_files=3)).file("gateway")
    for number in range(9):
        log.write(b'{"event": "%03d"}\n' % number)
        log.close()  # the size counts across openings
    kept = {
        path.name: [json.loads(line)["event"] for line in path.read_text().splitlines()] for path in tmp_path.iterdir()
    }
    assert kept == {
        "gateway.log": ["008"],
        "gateway.log.1": ["006", "007"],
        "gateway.log.2": ["004", "005"],
    }


def test_one_file_begins_anew_at_its_limit(tmp_path: Path) -> None:
    log = files(tmp_path, [], Disk(10_000), LogLimits(max_bytes=len(LINE), num_files=1)).file("gateway")
    for _ in range(3):
        log.write(LINE)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["gateway.log"]
    assert (tmp_path / "gateway.log").read_bytes() == LINE


def test_a_real_full_disk(small_disk: Path) -> None:
    dropped: list[OSError] = []
    log = LogFile(small_disk / "a.log", LogLimits(), dropped.append, lambda: None, open_append)
    log.write(LINE)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    while not dropped:
        log.write(LINE * 20)
    assert dropped[0].errno == errno.ENOSPC
    (small_disk / "ballast").unlink()
    log.write(LINE)
    log.close()
    assert (small_disk / "a.log").read_bytes().endswith(b'"num_lines": 1}\n' + LINE)
