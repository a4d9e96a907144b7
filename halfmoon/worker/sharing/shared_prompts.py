"""The prompts that this worker computes a part of: the others that compute them read it layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from halfmoon.background import Changes
from halfmoon.errors import NotFound
from halfmoon.kv.frame_plan import Written


class SharedPrompt:
    """Owns how much of one prompt's KV is written here, as far as was reported. Event-loop thread only."""

    def __init__(self, request_id: str, keys: Sequence[bytes]) -> None:
        """keys: of its whole blocks."""
        self.request_id = request_id
        self.keys = keys
        self._written = Written()
        self._is_gone = False
        self._changes = Changes()

    def on_kv(self, written: Written | None) -> None:
        """Takes the engine's report; None: the request has left the engine."""
        self._is_gone |= written is None
        self._written = written or Written()
        self._changes.notify()

    async def until_written(self, layer_end: int, start: int, end: int) -> None:
        """Returns when these tokens' K and V of all layers below `layer_end` are written. Raises NotFound."""
        while not self._written.has(layer_end - 1, start, end):
            await self.until_changed()

    async def until_changed(self) -> None:
        """Returns at the next report. Raises NotFound once the request is gone."""
        if self._is_gone:
            raise NotFound("this worker no longer computes the prompt")
        await self._changes.next()


class SharedPrompts:
    """Owns the shared prompts by request id. Event-loop thread only."""

    def __init__(self) -> None:
        self._prompts: dict[str, SharedPrompt] = {}
        self._arrivals = Changes()

    @contextmanager
    def computing(self, request_id: str, keys: Sequence[bytes]) -> Iterator[SharedPrompt]:
        """A prompt that can be read while inside."""
        prompt = self._prompts[request_id] = SharedPrompt(request_id, keys)
        self._arrivals.notify()
        try:
            yield prompt
        finally:
            del self._prompts[request_id]
            prompt.on_kv(None)

    async def get(self, request_id: str, wait_s: float) -> SharedPrompt:
        """The prompt, once it has arrived here. Raises NotFound if it does not arrive within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while request_id not in self._prompts:
                    await self._arrivals.next()
        except TimeoutError:
            raise NotFound("this worker does not compute the prompt") from None
        return self._prompts[request_id]
