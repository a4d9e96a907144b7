"""The interface of a transport: memory for payloads that both ends of a link share, apart from the stream of frames.

The stream carries every header and control frame on any transport, so there is one state machine. `grpc` is the
transport without shared memory: its payloads follow their headers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.negotiation import Offer


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Room for one payload: fill `place`, then pass the buffer to `TransferSender.data`, which takes it over."""

    view: memoryview  # writable, of the requested size; empty if the room is in device memory
    charge_bytes: int  # its share of the link's window
    memory: bytearray | int  # the memory itself: opaque outside the outlet
    reference: bytes = b""  # where the receiver finds the payload; empty: inside its message
    lent: Callable[[], object | None] = lambda: None  # not None while a view or an array of it exists
    device: DeviceBytes | None = None  # the room, if it is in device memory

    @property
    def place(self) -> KVPlace:
        """The room, in either memory."""
        return self.view if self.device is None else self.device

    @property
    def num_bytes(self) -> int:
        """Size of the room."""
        return self.view.nbytes if self.device is None else self.device.num_bytes

    def release(self) -> bool:
        """Ends the use of `place`; False while it, or an array of it, is still referenced and may be written."""
        self.view.release()
        self.device = None
        return self.lent() is None


def lend(memory: bytearray | memoryview, offset: int, num_bytes: int) -> tuple[memoryview, Callable[[], object | None]]:
    """A writable view of a part of `memory`, and a call that returns None once no view or array of it exists."""
    # numpy and torch reference the object behind a memoryview without its knowledge, so it gets an object of its own
    part = (ctypes.c_char * num_bytes).from_buffer(memory, offset)
    return memoryview(part).cast("B"), weakref.ref(part)


class Outlet(Protocol):
    """The sender's end of a transport on one link. Callers of `room` must hold enough of the window."""

    @property
    def name(self) -> str:
        """The transport's name in offers, logs and metrics."""

    def offer(self) -> Offer:
        """Parameters that a receiver needs to join."""

    def charge_bytes(self, num_bytes: int) -> int:
        """Bytes of the window that a payload of `num_bytes` takes."""

    def room(self, num_bytes: int) -> StagingBuffer:
        """A place for a payload."""

    def hold(self, payload: memoryview) -> StagingBuffer:
        """A place with this payload in it; not copied if the message will hold a copy anyway."""

    def reuse(self, buffer: StagingBuffer) -> None:
        """Frees the place: no one writes it, and no transfer that can still commit reads it."""

    def close(self) -> None:
        """Ends the link."""


class Source(Protocol):
    """Where a receiver that joined a transport reads payloads from."""

    async def fetch(self, reference: bytes, num_bytes: int) -> KVSource:
        """The payload, which stays unchanged until its frame is credited, or its sender gives the transfer up.

        Raises InvalidRequest for a bad reference.
        """

    def is_intact(self, reference: bytes) -> bool:
        """Whether everything read so far belongs to this payload. Raises InvalidRequest for a bad reference."""

    def close(self) -> None:
        """Ends the transfer."""


class Inlet(Protocol):
    """The receiver's end of a transport, for all links of a process."""

    @property
    def name(self) -> str:
        """The transport's name."""

    async def join(self, parameters: bytes) -> Source:
        """Joins a sender's offer. Raises Unavailable or Incompatible with the reason if that fails."""

    def close(self) -> None:
        """Leaves everything that was joined."""
