"""A supervised service that is killed is back at once: the process that has imported and loaded everything forks it.

The template computes nothing, so its memory is what its children share. It has no threads while it forks, which
`load` functions see to. It logs the death of a child that was ended from outside and forks the next one when its
supervisor writes a byte to its stdin. When it dies itself, its child serves on: they share stdin, whose end tells both
that the supervisor is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from halfmoon.rpc.server import SUPERVISED_ENV

log = logging.getLogger(__name__)

FORK_AGAIN = b"\n"  # what the supervisor writes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_CRASHES = frozenset(getattr(signal, f"SIG{name}") for name in ("ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP"))


def was_ended_from_outside(exit_code: int) -> bool:
    """Whether a process with this exit code, or minus its signal, was killed or told to stop, and did not fail."""
    return exit_code == 0 or (exit_code < 0 and -exit_code not in _CRASHES)


def is_template() -> bool:
    """Whether this process will fork its service: under a supervisor, where processes can be waited for by handle."""
    return bool(os.environ.get(SUPERVISED_ENV)) and hasattr(os, "pidfd_open")


def fork_service() -> None:
    """Returns in a child that serves; in this process, the template, never.

    The template forks another child, when its supervisor wants it, if one is ended without having been told to by the
    supervisor. It ends as its child did when the child failed or was told to stop.
    """
    gc.collect()
    gc.freeze()  # a collection in a child would write to every page that it shares
    while True:
        child = _Child()
        if child.pid == 0:
            return
        exit_code = child.wait()
        if child.was_signalled and -exit_code in _SIGNALS:
            os._exit(0)  # told twice, by the supervisor and from here, it ended at the second time, when it was done
        if child.was_signalled or not was_ended_from_outside(exit_code):
            _end_like(exit_code)
        log.warning("service.killed", extra={"reason": _reason(exit_code)})
        if not _is_wanted_again():
            _end_like(exit_code)


class _Child:
    """Owns a forked child. `pid` is 0 in the child itself."""

    def __init__(self) -> None:
        self.was_signalled = False
        self._before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        self.pid = -1
        self.pid = os.fork()
        if self.pid == 0:
            self._restore_signals()
            if self.was_signalled:  # since the fork, or a moment before it
                os.kill(os.getpid(), signal.SIGTERM)
        elif self.was_signalled:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Waits for the child's end and returns its exit code, or minus its signal."""
        handle = os.pidfd_open(self.pid)
        ends = select.poll()
        ends.register(handle, select.POLLIN)
        ends.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        while handle not in (ready := dict(ends.poll())):
            if ready and not os.read(sys.stdin.fileno(), 4096):  # the supervisor is gone, as the child notices, too
                ends.unregister(sys.stdin.fileno())
                self.was_signalled = True
        os.close(handle)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._restore_signals()
        return exit_code

    def _restore_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.was_signalled = True
        if self.pid > 0:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)


def _is_wanted_again() -> bool:
    """Waits for the supervisor's word. False if the supervisor is gone."""
    word = select.poll()
    word.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    word.poll()  # a child may have made reading non-blocking
    return bool(os.read(sys.stdin.fileno(), len(FORK_AGAIN)))


def _reason(exit_code: int) -> str:
    return f"ended with {signal.Signals(-exit_code).name}" if exit_code < 0 else "was told to stop"


def _end_like(exit_code: int) -> NoReturn:
    if exit_code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code if exit_code >= 0 else 1)
