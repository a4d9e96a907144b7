"""Reads the events of vLLM's prefix cache, which its scheduler's process publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch

_POLL_MS = 500

OnEvents = Callable[[Sequence[Any] | None], None]


class EventReader:
    """Owns a thread and its subscription. `on_events` is called on that thread; None: some events were lost."""

    def __init__(self, endpoint: str, on_events: OnEvents) -> None:
        """Subscribes; what was published before is not seen."""
        self._on_events = on_events
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="vllm-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        due = None
        while not self._closing.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if due is not None and sequence != due:
                self._on_events(None)
            due = sequence + 1
            self._on_events(decoder.decode(payload).events)
        self._socket.close()
        self._context.term()
