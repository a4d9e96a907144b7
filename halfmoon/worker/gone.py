"""The news that an engine has dropped a request while a call still works for it."""

from __future__ import annotations

import asyncio

from halfmoon.errors import Cancelled


class Gone:
    """Owns one piece of news. `told` raises Cancelled once it has come. Event-loop thread only."""

    def __init__(self) -> None:
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @staticmethod
    def error() -> Cancelled:
        """What everybody who works for the request is told."""
        return Cancelled("the request was cancelled while its KV was on its way")

    def tell(self) -> None:
        """The engine has dropped it. Means nothing after `close`."""
        if not self.told.done():
            self.told.set_exception(self.error())

    def close(self) -> None:
        """Nobody listens any more."""
        if not self.told.cancel() and not self.told.cancelled():
            self.told.exception()  # it was another error that ended the call: this one is no surprise
