"""Files whose content is read again when they have changed; what cannot be read changes nothing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from halfmoon.errors import HalfmoonError

log = logging.getLogger(__name__)

CHECK_S = 1.0  # how often files are looked at, at most

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """Owns the latest good content of some files. Usable from several threads.

    `read` raises a HalfmoonError if the files cannot be used, at the start too. `now_s` is a monotonic clock.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], Content],
        now_s: Callable[[], float] = time.monotonic,
        check_s: float = CHECK_S,
    ) -> None:
        self._paths = paths
        self._read = read
        self._now_s = now_s
        self._check_s = check_s
        self._lock = threading.Lock()
        self._checked_s = now_s()
        self._stamps = self._look()
        self._content = read()

    @property
    def current(self) -> Content:
        """The newest good content. Each change that cannot be used is logged once."""
        with self._lock:
            if self._now_s() >= self._checked_s + self._check_s:
                self._checked_s = self._now_s()
                stamps = self._look()
                if stamps != self._stamps:
                    self._stamps = stamps
                    self._take_over()
            return self._content

    def _take_over(self) -> None:
        files = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except HalfmoonError as error:
            log.error("tls.kept_old_certificate", extra={"files": files, "reason": error.message})
        else:
            log.info("tls.new_certificate", extra={"files": files})

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None for one that is away."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
