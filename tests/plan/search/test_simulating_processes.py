"""Processes that simulate end with the one that asked, whichever way that goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from halfmoon.plan.search.simulating_processes import simulating_processes

_DIES = """
import os, signal
from halfmoon.plan.search.simulating_processes import simulating_processes
with simulating_processes(2) as pool:
    pool.submit(os.getpid).result()
    pool.submit(signal.pause)
    os.kill(os.getpid(), signal.{how})
"""


def _interrupted() -> None:
    with simulating_processes(2) as pool:
        pool.submit(signal.pause)
        raise KeyboardInterrupt


@pytest.mark.parametrize("num", [1, 2])
def test_what_is_asked_is_done(num: int) -> None:
    with simulating_processes(num) as pool:
        assert list(pool.map(abs, range(-3, 3))) == [3, 2, 1, 0, 1, 2]
        assert (pool.submit(os.getpid).result() == os.getpid()) == (num == 1)


def test_who_computes_for_ever_ends_where_the_asking_process_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted()


def test_an_interrupt_from_the_terminal_is_for_the_asking_process_alone() -> None:
    with simulating_processes(2) as pool:
        assert signal.SIGINT in pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_nobody_stays_when_the_asking_process_is_killed(how: str) -> None:
    """Whoever is left holds the pipe that is read to its end here."""
    done = subprocess.run([sys.executable, "-c", _DIES.format(how=how)], capture_output=True, timeout=60, check=False)
    assert done.returncode == -getattr(signal, how)
