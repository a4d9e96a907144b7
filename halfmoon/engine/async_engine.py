"""The engine for asyncio: the one place where a thread meets the event loop.

One thread owns the engine. Between steps it runs commands from the loop; it steps while there is work and sleeps
otherwise. Results go back in order, so a request's first output never overtakes the answer to its `add`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from halfmoon.engine.config import EngineStats, StepResult
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.restoring import OnProgress, RestoreOrder
from halfmoon.errors import Incompatible, Unavailable
from halfmoon.kv.codec import Codec, decode, encode
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.layout import KVDtype

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_COPY_THREADS = 2  # for KV going in and out beside the steps


@dataclass(frozen=True, slots=True)
class _Command:
    call: Callable[[], Any]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _CheckRanks:
    """Another rank's process ended: the thread is to find out why, even if it has nothing to do."""


class AsyncEngine:
    """Owns the engine thread. `on_step` hears every step's result on the event loop; `on_death` that the thread died.

    Made inside a running loop. After `async with` ends, or the thread died, every method raises Unavailable and all
    blocks are free.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult], None],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.engine = engine
        self.failed: BaseException | None = None  # what killed the thread
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        self._on_death = on_death
        self._commands: queue.SimpleQueue[_Command | _CheckRanks | None] = queue.SimpleQueue()  # None: stop
        self._closed = True
        self._gate = threading.Lock()  # orders the last command against closing
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._copies = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="kv-copy")

    async def __aenter__(self) -> AsyncEngine:
        self._closed = False
        self._thread.start()
        self.engine.call_on_failure(partial(self._commands.put, _CheckRanks()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._copies.shutdown)

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """As `Engine.add`; who listens hears on the loop, in order. If the wait is cancelled, so is the request."""
        if order is not None:
            order = replace(order, on_progress=partial(self._tell_progress, order.on_progress))
        await self._call_or_cancel(partial(self.engine.add, request, self._on_loop(on_kv), order), request.request_id)

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """As `Engine.reserve`; `on_kv` hears on the loop. If the wait is cancelled, so is the reservation."""
        await self._call_or_cancel(partial(self.engine.reserve, request, self._on_loop(on_kv)), request.request_id)

    async def start(self, request_id: str, first_token_id: int) -> None:
        """As `Engine.start`."""
        await self._call(partial(self.engine.start, request_id, first_token_id))

    async def cancel(self, request_id: str) -> bool:
        """As `Engine.cancel`. Once it returns, no output of the request is delivered any more."""
        return await self._call(partial(self.engine.cancel, request_id))

    async def release(self, request_id: str) -> None:
        """As `Engine.release`."""
        await self._call(partial(self.engine.release, request_id))

    async def stats(self) -> EngineStats:
        """As `Engine.stats`, between two steps."""
        return await self._call(self.engine.stats)

    def stats_now(self) -> EngineStats:
        """As `Engine.stats` beside a step: counts of two moments, maybe."""
        return self.engine.stats()

    async def kv_write(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """As `Engine.kv_write`, beside the steps, of what `codec` made of values in `dtype` (None: the layout's).

        `payload` must not change until this returns. In device memory it can only be raw and in the layout's dtype:
        raises Incompatible.
        """
        layout = self.engine.layout
        shape = layout.shape(layer_end - layer_start, num_tokens)
        write = partial(self.engine.kv_write, request_id, layer_start, layer_end, token_start, num_tokens)

        def write_decoded() -> None:
            if isinstance(payload, DeviceBytes):
                if codec is not Codec.RAW or dtype not in (None, layout.dtype):
                    raise Incompatible("KV in device memory is taken as it is, raw and in the layout's dtype")
                write(payload)
            else:
                write(decode(codec, payload, shape, dtype or layout.dtype, layout.dtype).data)

        await self._copy(write_decoded)

    async def kv_read(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        out: KVPlace | None = None,
        codec: Codec = Codec.RAW,
    ) -> memoryview:
        """As `Engine.kv_read`, beside the steps, encoded in `codec`. `out`, if given, has exactly the encoded size.

        If the wait is cancelled, `out` may still be written to.
        """
        layout = self.engine.layout
        shape = layout.shape(layer_end - layer_start, num_tokens)
        read = partial(self.engine.kv_read, request_id, layer_start, layer_end, token_start, num_tokens)

        def read_encoded() -> memoryview:
            assert not isinstance(out, DeviceBytes), "codecs compute on the CPU"
            return encode(codec, decode(Codec.RAW, read(), shape, layout.dtype), layout.dtype, out)

        return await self._copy(partial(read, out) if codec is Codec.RAW else read_encoded)

    async def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """As `Engine.load_block`, beside the steps. `payload` must not change until this returns."""
        await self._copy(partial(self.engine.load_block, request_id, block, payload))

    def note_loaded(self, request_id: str, loaded: Sequence[int], given_up: Sequence[int] = ()) -> None:
        """As `Engine.note_loaded`, before the next step."""
        self._put(partial(self.engine.note_loaded, request_id, loaded, given_up))

    async def move_fence(self, request_id: str, fence: int) -> int:
        """As `Engine.move_fence`."""
        return await self._call(partial(self.engine.move_fence, request_id, fence))

    @asynccontextmanager
    async def cached(self, keys: Sequence[bytes]) -> AsyncIterator[list[int]]:
        """The blocks of the leading keys that the prefix cache has; inside they stay, for `read_block`."""
        blocks: list[int] = []
        try:
            await self._call(lambda: blocks.extend(self.engine.hold_cached(keys)))
            yield blocks
        finally:
            self._put(
                lambda: self.engine.let_cached_go(blocks)
            )  # after the call above, whether that was awaited or not

    async def read_block(self, block: int) -> memoryview:
        """As `Engine.read_block`, beside the steps."""
        return await self._copy(partial(self.engine.read_block, block))

    def _on_loop(self, on_kv: OnKV | None) -> OnKV | None:
        """What the engine's thread may call."""
        return None if on_kv is None else partial(self._tell, on_kv)

    def check_open(self) -> None:
        """Raises Unavailable, with the reason, once nothing is computed any more."""
        if self._closed:
            raise self._unavailable()

    async def _copy(self, call: Callable[[], T]) -> T:
        self.check_open()
        return await self._loop.run_in_executor(self._copies, call)

    async def _call_or_cancel(self, call: Callable[[], None], request_id: str) -> None:
        admitted = False  # read and written on the engine thread only

        def admit() -> None:
            nonlocal admitted
            call()
            admitted = True

        def undo() -> None:
            if admitted:  # else the name may be that of another request
                self.engine.cancel(request_id)

        try:
            await self._call(admit)
        except asyncio.CancelledError:
            self._put(undo)
            raise

    async def _call(self, call: Callable[[], T]) -> T:
        answer: asyncio.Future[T] | None = self._put(call)
        if answer is None:
            raise self._unavailable()
        return await answer

    def _put(self, call: Callable[[], T]) -> asyncio.Future[T] | None:
        """Hands a command to the thread; None when there is no thread to hear it."""
        with self._gate:
            if self._closed:
                return None
            answer: asyncio.Future[T] = self._loop.create_future()
            self._commands.put(_Command(call, answer))
            return answer

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the engine died: {self.failed!r}" if self.failed else "the engine is closed")

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            logger.exception("engine_thread_died")
            self.failed = error
        self._close()

    def _serve(self) -> None:
        idle = True
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                idle = self._step()
                continue
            if command is None:
                return
            if isinstance(command, _CheckRanks):
                self.engine.check_ranks()
                continue
            self._answer(command)
            idle = not self.engine.has_work()

    def _step(self) -> bool:
        """One step; whether the next one must wait for a command: no work, or none that has blocks."""
        result = self.engine.step()
        did_something = not result.is_empty or result.num_preempted > 0
        if did_something:
            self._loop.call_soon_threadsafe(self._on_step, result)
        return not did_something or not self.engine.has_work()

    def _answer(self, command: _Command) -> None:
        try:
            result = command.call()
        except Exception as error:
            self._deliver(command.answer, None, error)
        else:
            self._deliver(command.answer, result, None)

    def _tell_progress(self, on_progress: OnProgress, num_tokens: int, num_loaded: int) -> None:
        self._loop.call_soon_threadsafe(on_progress, num_tokens, num_loaded)

    def _tell(self, on_kv: OnKV, written: Written | None) -> None:
        self._loop.call_soon_threadsafe(on_kv, written)

    def _deliver(self, answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(_resolve, answer, result, error)

    def _close(self) -> None:
        """No new commands; those in the queue fail; every request's blocks are freed; a death is told in any case."""
        with self._gate:
            self._closed = True
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Command):
                self._deliver(command.answer, None, self._unavailable())
        for end in (self.engine.cancel_all, self.engine.close):
            try:
                end()
            except Exception as error:  # what killed the thread may break this, too
                logger.exception("engine_close_failed")
                self.failed = self.failed or error
        if self.failed is not None and self._on_death is not None:
            self._loop.call_soon_threadsafe(self._on_death, self.failed)


def _resolve(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():  # the one who waited was cancelled
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
