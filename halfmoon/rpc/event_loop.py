"""The event loop of services: uvloop's if installed, which takes all of gRPC's wake-ups in one round.

gRPC's poller thread writes a byte to a socket for each event, and asyncio's side reads one byte a round, though it
handles all events then. Once a few hundred bytes wait, the poller thread blocks, and a loop with long rounds has one
event in each: workers' reports and tokens wait for seconds behind others.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import HasFileno

    _Loop = asyncio.SelectorEventLoop
else:
    try:
        from uvloop import Loop as _Loop
    except ImportError:
        _Loop = asyncio.SelectorEventLoop

_POLLER = "PollerCompletionQueue"  # gRPC's class whose method reads the socket
_MOST_BYTES = 65_536
_Args = TypeVarTuple("_Args")


class ServiceLoop(_Loop):
    """An event loop on which gRPC's poller thread never waits for more than one round."""

    def add_reader(self, fd: int | HasFileno, callback: Callable[[*_Args], Any], *args: *_Args) -> None:
        """Has `callback(*args)` called when `fd` can be read; of gRPC's wake-ups one is left for it to read."""
        if isinstance(fd, socket.socket) and _is_poller(callback):
            super().add_reader(fd, _read_at_once, fd, partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)


def _is_poller(callback: Callable[..., Any]) -> bool:
    method = callback.func if isinstance(callback, partial) else callback
    return type(getattr(method, "__self__", None)).__name__ == _POLLER


def _read_at_once(wakeups: socket.socket, callback: Callable[[], Any]) -> None:
    num_bytes = len(wakeups.recv(_MOST_BYTES, socket.MSG_PEEK))
    if num_bytes > 1:
        wakeups.recv(num_bytes - 1)
    callback()
