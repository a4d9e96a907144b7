"""What a transport is: a place for payloads that the two ends of a link share, apart from the stream of frames.

The stream carries every header and control frame whatever the transport, so there is one state machine. `grpc` is the
transport without a place of its own: its payloads follow their headers.
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
    """Room for one payload: fill `place`, then give the buffer to `TransferSender.data`, which takes it over."""

    view: memoryview  # writable, as many bytes as were asked for; none where the room is in device memory
    charge_bytes: int  # what it takes of the link's window
    memory: bytearray | int  # the place itself: the outlet's business
    reference: bytes = b""  # where the receiver finds the payload; empty: it travels inside its message
    lent: Callable[[], object | None] = lambda: None  # something as long as a view or an array of it lives
    device: DeviceBytes | None = None  # the room, where it is in device memory

    @property
    def place(self) -> KVPlace:
        """The room, wherever it is."""
        return self.view if self.device is None else self.device

    @property
    def num_bytes(self) -> int:
        """Size of the room."""
        return self.view.nbytes if self.device is None else self.device.num_bytes

    def release(self) -> bool:
        """Ends the use of `place`; False while somebody still has it, or an array of it, and may be filling it."""
        self.view.release()
        self.device = None
        return self.lent() is None


def lend(memory: bytearray | memoryview, offset: int, num_bytes: int) -> tuple[memoryview, Callable[[], object | None]]:
    """A writable view of a part of `memory`, and a call that gives None when nobody has a view or array of it."""
    # numpy and torch take hold of what a memoryview is of, unseen by the memoryview: so it is of an object of its own
    part = (ctypes.c_char * num_bytes).from_buffer(memory, offset)
    return memoryview(part).cast("B"), weakref.ref(part)


class Outlet(Protocol):
    """The sender's end of a transport on one link. Who calls `room` has made sure that the window allows it."""

    @property
    def name(self) -> str:
        """The transport's name in offers, logs and metrics."""
        ...

    def offer(self) -> Offer:
        """What a receiver needs to join."""
        ...

    def charge_bytes(self, num_bytes: int) -> int:
        """What a payload of `num_bytes` takes of the window."""
        ...

    def room(self, num_bytes: int) -> StagingBuffer:
        """A place for a payload."""
        ...

    def hold(self, payload: memoryview) -> StagingBuffer:
        """A place with this payload in it; not copied where the message will hold a copy anyway."""
        ...

    def reuse(self, buffer: StagingBuffer) -> None:
        """The place is free again: nobody writes it any more, and no transfer that can still commit reads it."""
        ...

    def close(self) -> None:
        """The link is over."""
        ...


class Source(Protocol):
    """What a receiver that joined a transport reads payloads from."""

    async def fetch(self, reference: bytes, num_bytes: int) -> KVSource:
        """The payload, which stays as it is until its frame is credited, or its sender has given the transfer up.

        Raises InvalidRequest for a bad reference.
        """
        ...

    def is_intact(self, reference: bytes) -> bool:
        """Whether all that was read of the payload until now was of this one. Raises InvalidRequest as `fetch`."""
        ...

    def close(self) -> None:
        """The transfer is over."""
        ...


class Inlet(Protocol):
    """The receiver's end of a transport, for all the links of a process."""

    @property
    def name(self) -> str:
        """The transport's name."""
        ...

    async def join(self, parameters: bytes) -> Source:
        """Joins what a sender offered. Raises Unavailable or Incompatible with the reason why that cannot be."""
        ...

    def close(self) -> None:
        """Leaves everything that was joined."""
        ...
