"""The news that the engine has dropped a request while a call still works for it."""

from __future__ import annotations

import asyncio

from halfmoon.errors import Cancelled, HalfmoonError, Unavailable
from halfmoon.worker.serving_engine import ServingEngine


class RequestDropped:
    """Owns one piece of news. `told` raises Cancelled once it has come, Unavailable if the whole engine went.

    Event-loop thread only.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def error(self) -> HalfmoonError:
        """What everybody who works for the request is told."""
        try:
            self._engine.check_open()
        except Unavailable as error:
            return error
        return Cancelled("the request was cancelled while its KV was on its way")

    def tell(self) -> None:
        """The engine has dropped it. Means nothing after `close`."""
        if not self.told.done():
            self.told.set_exception(self.error())

    def close(self) -> None:
        """Nobody listens any more."""
        if not self.told.cancel() and not self.told.cancelled():
            self.told.exception()  # it was another error that ended the call: this one is no surprise
