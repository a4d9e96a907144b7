"""Worker processes for simulations, which never outlive their parent."""

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
    """Provides `num` processes, or one thread if `num` is 1. Pending work is dropped at the end of the block.

    Processes end at once if the block raises, and if this process dies for any reason. The terminal sends an interrupt
    to all of them, but only this process handles it.
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
    """Starts all processes with interrupts blocked; they inherit the blocked signal for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(num):
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(held_until: Connection) -> None:
    """Runs in each process: ends it when the other end of the pipe is closed."""
    threading.Thread(target=_end_after, args=(held_until,), daemon=True).start()


def _end_after(held_until: Connection) -> None:
    held_until.poll(None)  # nothing is ever sent, so it becomes readable at its end
    os._exit(1)
