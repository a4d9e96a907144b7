"""Processes that simulate beside each other, and never outlive the one that asked them to."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection


@contextmanager
def simulating_processes(num: int) -> Iterator[Executor]:
    """So many, or a thread of this one alone. What waits is dropped when this is left.

    Processes end at once when it is left by an exception, and when this process dies, whatever it dies of. An
    interrupt from the terminal, which all of them get, is for this one.
    """
    if num == 1:
        with _shut_down(ThreadPoolExecutor(1)) as thread:
            yield thread
        return
    context = multiprocessing.get_context("spawn")
    held_until, holding = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(num, context, _end_with, (held_until,))
    with held_until, holding, _shut_down(pool):
        _start(pool, num)
        try:
            yield pool
        except BaseException:
            holding.close()
            raise


@contextmanager
def _shut_down(pool: Executor) -> Iterator[Executor]:
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start(pool: Executor, num: int) -> None:
    """All processes, with interrupts blocked: who is started while they are has them blocked for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(num):
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(held_until: Connection) -> None:
    """In a process that simulates: it ends when nobody holds the pipe's other end any more."""
    threading.Thread(target=_end_after, args=(held_until,), daemon=True).start()


def _end_after(held_until: Connection) -> None:
    held_until.poll(None)  # nothing is ever sent: it is readable at its end
    os._exit(1)
