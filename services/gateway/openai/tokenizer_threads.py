"""Threads that read and tokenize long bodies, so that the event loop and short requests go on meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from halfmoon.errors import Cancelled, NoCapacity
from halfmoon.freed_memory import give_back_freed_memory
from services.gateway.openai.served_model import Encodes, PromptPrefix, ServedModel

T = TypeVar("T")

_SHORT_BYTES = 1 << 16  # tokenized in at most about 0.1 s, whatever they hold
_NUM_SHORT, _NUM_LONG, _NUM_WAITING = 4, 2, 2  # threads
_MOST_LONG_BYTES = 256 << 20  # of long bodies that are read or wait, all of which are in memory
_TRIM_BYTES = 1 << 20  # bodies from here on leave much free memory behind
_NICE = 10  # of threads for long bodies: below workers and the event loop


class TokenizerThreads:
    """Owns the threads. Long bodies have some of their own, and those that wait for others: short ones never do."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_NUM_SHORT, thread_name_prefix="tokenize-short")
        self._long = ThreadPoolExecutor(_NUM_LONG, thread_name_prefix="tokenize-long", initializer=_be_nice)
        self._waiting = ThreadPoolExecutor(_NUM_WAITING, thread_name_prefix="tokenize-waiting")
        self._long_bytes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for executor in (self._short, self._long, self._waiting):
            executor.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, work: Callable[[ServedModel], T], model: ServedModel, num_bytes: int, *, waits: bool = False
    ) -> T:
        """Calls `work` in a thread with a model whose tokenizer stops once the caller is cancelled.

        `num_bytes` is the size of the body; `waits`: the work waits for something else, such as a process. Raises
        NoCapacity if too many long ones are there already.
        """
        is_long = num_bytes > _SHORT_BYTES
        long_bytes = num_bytes if is_long else 0
        if self._long_bytes + long_bytes > _MOST_LONG_BYTES:
            raise NoCapacity(
                f"{self._long_bytes >> 20} MiB of long prompts are being read already: come back later",
                retry_after_ms=1_000,
            )
        stop = threading.Event()
        stoppable = replace(model, tokenizer=_StoppableTokenizer(model.tokenizer, stop))
        call = partial(copy_context().run, _trimming if num_bytes >= _TRIM_BYTES else _calling, work, stoppable)
        self._long_bytes += long_bytes
        executor = self._waiting if waits else self._long if is_long else self._short
        future = asyncio.get_running_loop().run_in_executor(executor, call)
        future.add_done_callback(partial(self._end, long_bytes))
        try:
            return await future
        finally:
            stop.set()

    def _end(self, long_bytes: int, ended: asyncio.Future[Any]) -> None:
        self._long_bytes -= long_bytes


class _StoppableTokenizer:
    """A tokenizer that refuses to begin another text once it is stopped."""

    def __init__(self, tokenizer: Encodes, stop: threading.Event) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self.begin: Callable[..., PromptPrefix] = tokenizer.begin
        self.render_chat = tokenizer.render_chat
        self.decode = tokenizer.decode
        self.part_bytes = tokenizer.part_bytes
        self.token_name = tokenizer.token_name

    def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
        """Token ids of a text. Raises Cancelled once stopped."""
        if self._stop.is_set():
            raise Cancelled("the client went away while its prompt was read")
        return self._tokenizer.encode(text, with_special=with_special, salt=salt)


def _calling(work: Callable[[ServedModel], T], model: ServedModel) -> T:
    return work(model)


def _trimming(work: Callable[[ServedModel], T], model: ServedModel) -> T:
    """Gives the memory that tokenizing took back to the system."""
    try:
        return work(model)
    finally:
        give_back_freed_memory()


def _be_nice() -> None:
    """Lowers the priority of this thread; other systems than Linux lower the process's."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
