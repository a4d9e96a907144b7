"""Notification that the engine has dropped a request while a call still works on it."""

from __future__ import annotations

import asyncio

from halfmoon.errors import Cancelled, HalfmoonError, Unavailable
from halfmoon.worker.serving_engine import ServingEngine


class RequestDropped:
    """Owns one notification. `event` raises Cancelled when it arrives, Unavailable if the whole engine is gone.

    Event-loop thread only.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self.event: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def error(self) -> HalfmoonError:
        """The error for every call that works on the request."""
        try:
            self._engine.check_open()
        except Unavailable as error:
            return error
        return Cancelled("the request was cancelled while its KV was on its way")

    def notify(self) -> None:
        """Reports that the engine has dropped the request. Does nothing after `close`."""
        if not self.event.done():
            self.event.set_exception(self.error())
            self.event.exception()  # marks it as retrieved: the call may be over before it waits for the event

    def close(self) -> None:
        """Stops listening."""
        self.event.cancel()
