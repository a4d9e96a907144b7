"""A follower that is a fork of a process that has loaded torch, which takes any other three seconds of processor."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import Pipe
from multiprocessing.forkserver import _forkserver
from typing import Any

from halfmoon.engine.parallel.follower import follow_to_the_end

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class ForkedFollower:
    """See `halfmoon.engine.parallel.followers.LocalFollower`."""

    def __init__(self) -> None:
        self.steps, far_steps = Pipe()
        self.copies, far_copies = Pipe()
        self._process = _CONTEXT.Process(target=_follow, args=(far_steps, far_copies), daemon=True)
        self._process.start()
        far_steps.close()
        far_copies.close()

    def kill(self) -> None:
        """See `Follower.kill`."""
        self._process.kill()

    def last_state(self) -> str:
        """See `Follower.last_state`."""
        self._process.join()
        return f"ended with exit status {self._process.exitcode}"

    def end(self, patience_s: float) -> None:
        """See `Follower.end`."""
        for pipe in (self.steps, self.copies):
            pipe.close()
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _follow(steps: Any, copies: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    follow_to_the_end(steps, copies)
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def end_forking() -> None:
    """Ends the process that is forked, if there is one. Idempotent."""
    stop: Any = _forkserver
    stop._stop()
