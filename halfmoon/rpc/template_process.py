"""A supervised service that is killed is back at once: the process that has imported and loaded everything forks it.

The template computes nothing, so its memory is what its children share. It has no threads while it forks, which
`load` functions see to. A child notices by its stdin that the template, or the template's supervisor, is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from halfmoon.rpc.server import SUPERVISED_ENV

log = logging.getLogger(__name__)

_SETTLED_S = 3.0  # a child killed earlier is not forked again: the supervisor knows how to wait
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def is_template() -> bool:
    """Whether this process will fork its service: under a supervisor, where processes can be waited for by handle."""
    return bool(os.environ.get(SUPERVISED_ENV)) and hasattr(os, "pidfd_open")


def fork_service() -> None:
    """Returns in a child that serves; in this process, the template, never.

    The template forks another child when one is killed, or ends without having been told to by the supervisor. It ends
    as its child did when the child failed, died early or was told to stop.
    """
    gc.collect()
    gc.freeze()  # a collection in a child would write to every page that it shares
    while True:
        child = _Child()
        if child.pid == 0:
            return
        status = child.wait()
        if child.is_told and os.WIFSIGNALED(status) and os.WTERMSIG(status) in _SIGNALS:
            os._exit(0)  # told twice, by the supervisor and from here, it ended at the second time, when it was done
        if child.is_told or child.lived_s < _SETTLED_S or not _may_run_again(status):
            _end_like(status)
        log.warning("service.killed", extra={"reason": _reason(status)})


class _Child:
    """Owns a forked child and the pipe that is its stdin. `pid` is 0 in the child itself."""

    def __init__(self) -> None:
        self.is_told = False
        self._started_s = time.monotonic()
        self._before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        read_end, self._write_end = os.pipe()
        self.pid = -1
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write_end)
            os.dup2(read_end, sys.stdin.fileno())
            self._restore_signals()
            if self.is_told:  # since the fork, or a moment before it
                os.kill(os.getpid(), signal.SIGTERM)
        elif self.is_told:
            os.kill(self.pid, signal.SIGTERM)
        os.close(read_end)

    @property
    def lived_s(self) -> float:
        """Seconds since the fork."""
        return time.monotonic() - self._started_s

    def wait(self) -> int:
        """Waits for the child's end and returns its wait status. Closes its stdin when the supervisor is gone."""
        handle = os.pidfd_open(self.pid)
        ends = select.poll()
        ends.register(handle, select.POLLIN)
        ends.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        while handle not in (ready := dict(ends.poll())):
            if ready and not os.read(sys.stdin.fileno(), 4096):
                ends.unregister(sys.stdin.fileno())
                os.close(self._write_end)
                self._write_end = -1
                self.is_told = True
        os.close(handle)
        if self._write_end >= 0:
            os.close(self._write_end)
        status = os.waitpid(self.pid, 0)[1]
        self._restore_signals()
        return status

    def _restore_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_told = True
        if self.pid > 0:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)


def _may_run_again(status: int) -> bool:
    """Whether a child with this wait status was killed or stopped from outside. One that failed may fail again."""
    return os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0


def _reason(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended with {signal.Signals(os.WTERMSIG(status)).name}"
    return "was told to stop"


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
