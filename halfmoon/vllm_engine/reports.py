"""Reports of vLLM's processes to the worker, and its answers to them, over a Unix socket: both ends. No vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from halfmoon.vllm_engine.messages import Keep, Report, decode_keep, decode_report, encode_keep, encode_report

_READ_BYTES = 1 << 16


class ReportListener:
    """Reads reports on the event loop, in each sender's order.

    Owns a Unix socket in a directory of its own, which no other user may enter, and the senders' connections.
    """

    def __init__(self, on_report: Callable[[Report], Keep | None], on_end: Callable[[], None]) -> None:
        """`on_report` returns what is answered to the sender; `on_end`: called when a sender's process has ended."""
        self._on_report = on_report
        self._on_end = on_end
        self._directory = tempfile.TemporaryDirectory(prefix="halfmoon-vllm-")
        self.path = str(Path(self._directory.name) / "reports")
        self.events_endpoint = f"ipc://{self._directory.name}/events"  # where vLLM publishes its cache's events
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self.path)
        self._socket.listen(64)  # senders connect before anybody accepts, while vLLM starts
        self._senders: dict[socket.socket, bytes] = {}  # what has been read of the next line

    def start(self) -> None:
        """Reads from now on. Event-loop thread only."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self.drain)
        self.drain()

    def drain(self) -> None:
        """Handles every report that has been sent by now, so that none comes after an output that it precedes."""
        with contextlib.suppress(BlockingIOError):
            while True:
                sender, _ = self._socket.accept()
                sender.setblocking(False)
                self._senders[sender] = b""
                self._loop.add_reader(sender, self._read, sender)
        for sender in tuple(self._senders):
            self._read(sender)

    def close(self) -> None:
        """Closes all connections and removes the socket."""
        for sender in tuple(self._senders):
            self._drop(sender)
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._directory.cleanup()

    def _read(self, sender: socket.socket) -> None:
        while sender in self._senders:
            try:
                data = sender.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(sender)
                self._on_end()
                return
            *lines, rest = (self._senders[sender] + data).split(b"\n")
            self._senders[sender] = rest
            for line in lines:
                answer = self._on_report(decode_report(line))
                if answer is not None:
                    with contextlib.suppress(OSError):  # its end is noticed when it is read from
                        sender.send(encode_keep(answer))

    def _drop(self, sender: socket.socket) -> None:
        del self._senders[sender]
        self._loop.remove_reader(sender)
        sender.close()


class ReportSender:
    """Sends reports to the worker process, and reads its answers."""

    def __init__(self, path: str) -> None:
        self._socket = _connected(path)
        self._unread = b""

    def send(self, *reports: Report) -> None:
        """Waits only while the worker is far behind. Raises OSError if it is gone."""
        if reports:
            self._socket.sendall(b"".join(map(encode_report, reports)))

    def answers(self) -> list[Keep]:
        """Those that have come by now. Never waits."""
        with contextlib.suppress(BlockingIOError):
            self._unread += self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        *lines, self._unread = self._unread.split(b"\n")
        return list(map(decode_keep, lines))


class Lifeline:
    """Ends a process of vLLM with the worker, however that ends: nobody could use the process, nor its memory.

    It is a value among vLLM's settings, and does its work in each process that unpickles those, which is the first that
    vLLM does there: a worker may be killed while its vLLM loads weights.
    """

    def __init__(self, path: str, owner: int | None = None) -> None:
        self._path = path
        self._owner = os.getpid() if owner is None else owner
        if self._owner != os.getpid():
            threading.Thread(target=self._end_with_owner, name="worker-watch", daemon=True).start()

    def __reduce__(self) -> tuple[type[Lifeline], tuple[str, int]]:
        return Lifeline, (self._path, self._owner)

    def _end_with_owner(self) -> None:
        with contextlib.suppress(OSError):
            _connected(self._path).recv(1)
        os._exit(1)


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection
