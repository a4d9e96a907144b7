"""The engine's thread: the one place where a thread meets the event loop.

Between steps it runs commands from the loop, and between the layers of steps that can be interrupted; it steps while
there is work and sleeps otherwise. Results go back in order, so a request's first output never overtakes the answer to
its `add`. Where the engine asks for a pause between steps, commands end it as soon as it is not due any more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from halfmoon.engine.engine import Engine
from halfmoon.engine.scheduling.interruptible_step import StepRuns
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STACK_BYTES = 16 << 20  # for structured outputs: four times what gateways check them with


@dataclass(frozen=True, slots=True)
class _Command:
    call: Callable[[], Any]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _CheckRanks:
    """Makes the thread find out why another rank's process ended, even if it has nothing to do."""


class EngineThread:
    """Owns the thread, the commands that wait for it, and whether it is alive. Knows nothing of what commands do.

    Created inside a running loop. `on_step` is called there with every step's result, `on_death` when the thread died.
    Once it has ended, or died, every command is answered with Unavailable, and the engine holds nothing.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult], None],
        on_death: Callable[[BaseException], None] | None,
    ) -> None:
        self.failed: BaseException | None = None  # what killed the thread
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        self._on_death = on_death
        self._commands: queue.SimpleQueue[_Command | _CheckRanks | None] = queue.SimpleQueue()  # None: stop
        self._postponed: list[_Command | _CheckRanks | None] = []  # at most one, taken before its step has ended
        self._closed = True
        self._stepped_s = 0.0  # end of the last step
        self._gate = threading.Lock()  # orders the last command against closing
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which takes commands from now on."""
        self._closed = False
        usual_bytes = threading.stack_size(_STACK_BYTES)
        self._thread.start()
        threading.stack_size(usual_bytes)
        self._engine.call_on_failure(partial(self._commands.put, _CheckRanks()))

    async def stop(self) -> None:
        """Stops the thread after the commands that are queued; returns when it has ended."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def check_open(self) -> None:
        """Raises Unavailable, with the reason, once nothing is computed any more."""
        if self._closed:
            raise self._unavailable()

    async def call(self, call: Callable[[], T]) -> T:
        """Runs `call` on the thread and returns or raises its outcome. A cancelled wait does not cancel the command."""
        answer = self.put(call)
        if answer is None:
            raise self._unavailable()
        return await answer

    def put(self, call: Callable[[], T]) -> asyncio.Future[T] | None:
        """Queues a command; None if there is no thread to run it."""
        with self._gate:
            if self._closed:
                return None
            answer: asyncio.Future[T] = self._loop.create_future()
            self._commands.put(_Command(call, answer))
            self._engine.interrupt()
            return answer

    def on_loop(self, listener: Callable[..., None]) -> Callable[..., None]:
        """Wraps `listener` for calls from the engine's thread or its device's, so that it runs on the loop."""

        def notify(*what: Any) -> None:
            self._loop.call_soon_threadsafe(listener, *what)

        return notify

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the engine died: {self.failed!r}" if self.failed else "the engine is closed")

    # Everything below runs on the thread.

    def _run(self) -> None:
        self._engine.call_between_layers(self._between_layers)
        try:
            self._serve()
        except BaseException as error:
            logger.exception("engine_thread_died")
            self.failed = error
        self._close()

    def _serve(self) -> None:
        idle = True
        while True:
            pause_s = 0.0 if idle else self._engine.pause_s() - (time.perf_counter() - self._stepped_s)
            try:
                command = self._next_command(idle, pause_s)
            except queue.Empty:
                idle = self._step()
                self._stepped_s = time.perf_counter()
                continue
            if command is None:
                return
            if isinstance(command, _CheckRanks):
                self._engine.check_ranks()
                continue
            self._answer(command)
            idle = not self._engine.has_work()

    def _next_command(self, idle: bool, pause_s: float) -> _Command | _CheckRanks | None:
        """Waits for a command: if `idle` any time, preparing memory meanwhile, else `pause_s`. Raises queue.Empty."""
        if self._postponed:
            return self._postponed.pop()
        if not idle:
            return self._commands.get(block=pause_s > 0, timeout=max(pause_s, 0.0))
        while True:
            with suppress(queue.Empty):
                return self._commands.get(timeout=self._engine.prefault_pause_s(time.perf_counter() - self._stepped_s))
            if not self._engine.prefault():
                return self._commands.get()

    def _between_layers(self) -> None:
        """Runs commands up to the first that must wait for the end of the running step, then a nested step."""
        while not self._postponed and not self._commands.empty():
            command = self._commands.get()
            if not isinstance(command, _Command) or not self._answer(command):
                self._postponed.append(command)
        result = self._engine.nested_step()
        if result is not None:
            self._loop.call_soon_threadsafe(self._on_step, result)

    def _step(self) -> bool:
        """Runs one step; returns whether the next one must wait for a command: no work, or none that has blocks."""
        result = self._engine.step()
        did_something = not result.is_empty or result.num_preempted > 0
        if did_something:
            self._loop.call_soon_threadsafe(self._on_step, result)
        return not did_something or not self._engine.has_work()

    def _answer(self, command: _Command) -> bool:
        """Runs a command; returns whether it did, instead of having to wait for the end of a step."""
        try:
            result = command.call()
        except StepRuns:
            return False
        except Exception as error:
            self._deliver(command.answer, None, error)
        else:
            self._deliver(command.answer, result, None)
        return True

    def _deliver(self, answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(_resolve, answer, result, error)

    def _close(self) -> None:
        """Refuses new commands, fails queued ones and frees every request's blocks; always reports a death."""
        with self._gate:
            self._closed = True
        while self._postponed or not self._commands.empty():
            command = self._next_command(idle=False, pause_s=0.0)
            if isinstance(command, _Command):
                self._deliver(command.answer, None, self._unavailable())
        for end in (self._engine.cancel_all, self._engine.close):
            try:
                end()
            except Exception as error:  # whatever killed the thread may break this, too
                logger.exception("engine_close_failed")
                self.failed = self.failed or error
        if self.failed is not None and self._on_death is not None:
            self._loop.call_soon_threadsafe(self._on_death, self.failed)


def _resolve(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():  # the caller was cancelled
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
