"""The transport `nixl`: the receiver pulls payloads out of the sender's memory, over RDMA, TCP or whatever UCX finds.

Needs the extra `halfmoon[nixl]`. The sender's memory is cut into slots, as with shared memory; the receiver copies each
into memory of its own, so no memory of the sender is read after a frame was fetched.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import struct
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from halfmoon.errors import DeadlineExceeded, HalfmoonError, Incompatible, Unavailable
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.kv.negotiation import Offer
from halfmoon.rpc.transport.slots import Slots, decode_reference, slots_bytes

NAME = "nixl"

_REGION = struct.Struct("<QQ")  # an offer: address and size of the sender's memory; then its agent's metadata
_PULL_S = 10.0
_POLL_S = 50e-6
_MAX_SENDERS = 64  # known at once; addresses change when workers restart
_MAX_PULLS = 16  # at once; a pull from a stalled sender keeps its thread until it gives up


class _Registered:
    """Memory that an agent may reach."""

    def __init__(self, agent: Any, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        agent.register_memory([(self.address, num_bytes, 0, "")], "DRAM")


class NixlOutlet(Slots):
    """Owns one link's agent and memory."""

    name = NAME

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Raises Incompatible without the extra, Unavailable if NIXL cannot work. Takes tenths of a second."""
        self._agent: Any = _new_agent(has_progress_thread=True)
        self._region = _Registered(self._agent, slots_bytes(num_slots, slot_bytes))
        super().__init__(self._region.memory, num_slots, slot_bytes)

    def offer(self) -> Offer:
        """The memory's address and how to reach its agent."""
        region = _REGION.pack(self._region.address, self._region.memory.nbytes)
        return Offer(NAME, region + self._agent.get_agent_metadata())

    def close(self) -> None:
        """Ends the agent before its memory, which the agent's own thread may be reading for a receiver."""
        self._agent = None


class NixlInlet:
    """Owns this process's receiving agent, made for the first offer, and the memory that transfers pull into."""

    name = NAME

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._agent: Any = None
        self._senders: OrderedDict[bytes, Any] = OrderedDict()  # agent names by metadata, least recently used first
        self._rooms: list[_Registered] = []
        self._lost: list[_Registered] = []
        self._threads = ThreadPoolExecutor(_MAX_PULLS, thread_name_prefix="nixl-pull")

    async def join(self, parameters: bytes) -> _Puller:
        """Connects to the sender's agent. Raises Incompatible without the extra, Unavailable if it fails."""
        if len(parameters) < _REGION.size:
            raise Incompatible("an offer of nixl must name the sender's memory")
        address, num_bytes = _REGION.unpack_from(parameters)
        async with self._making:
            if self._agent is None:
                self._agent = await asyncio.to_thread(_new_agent, has_progress_thread=False)
            sender = await self._sender(parameters[_REGION.size :])
        return _Puller(self, self._agent, sender, address, num_bytes)

    def room(self) -> _Registered:
        """Memory for one transfer's payloads."""
        return self._rooms.pop() if self._rooms else _Registered(self._agent, MAX_PAYLOAD_BYTES)

    def leave(self, room: _Registered, is_written: bool) -> None:
        """Ends the use of a room. If it may still be written to, it is neither reused nor freed."""
        (self._lost if is_written else self._rooms).append(room)

    def pulling(self, pull: Callable[[], None]) -> asyncio.Future[None]:
        """Runs one pull of a transfer on a thread of its own."""
        return asyncio.get_running_loop().run_in_executor(self._threads, pull)

    def close(self) -> None:
        """Releases the agent and its memory with the last transfer."""
        self._rooms.clear()
        self._threads.shutdown(wait=False)

    async def _sender(self, metadata: bytes) -> Any:
        if metadata not in self._senders:
            try:
                self._senders[metadata] = await asyncio.to_thread(self._agent.add_remote_agent, metadata)
            except Exception as err:  # the bindings have exception classes of their own
                raise Unavailable(f"nixl cannot reach the sender: {err}") from err
        self._senders.move_to_end(metadata)
        while len(self._senders) > _MAX_SENDERS:
            self._agent.remove_remote_agent(self._senders.popitem(last=False)[1])
        return self._senders[metadata]


class _Puller:
    """Owns the memory that receives one transfer's payloads, one after the other."""

    def __init__(self, inlet: NixlInlet, agent: Any, sender: Any, address: int, num_bytes: int) -> None:
        self._inlet = inlet
        self._agent = agent
        self._sender = sender
        self._address = address  # of the sender's memory
        self._num_bytes = num_bytes
        self._room = inlet.room()
        self._pulling: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the latest pull
        self._pulling.set_result(None)

    async def fetch(self, reference: bytes, num_bytes: int) -> KVBytes:
        """The payload, valid until the next fetch. Raises Unavailable if the sender is gone, DeadlineExceeded."""
        place = decode_reference(reference)
        place.check_within(num_bytes, self._num_bytes)
        self._pulling = self._inlet.pulling(partial(self._pull, self._address + place.offset, num_bytes))
        await asyncio.shield(self._pulling)  # its thread cannot be stopped
        return self._room.memory[:num_bytes]

    def is_intact(self, reference: bytes) -> bool:
        """True: the payload that the frame's digest was compared with lies in our own memory."""
        return True

    def close(self) -> None:
        """Returns the room for the next transfer once nothing can arrive any more, if that can be known."""
        self._pulling.add_done_callback(lambda done: self._inlet.leave(self._room, done.exception() is not None))

    def _pull(self, address: int, num_bytes: int) -> None:
        try:
            self._read(address, num_bytes)
        except HalfmoonError:
            raise
        except Exception as err:  # the bindings have exception classes of their own
            raise Unavailable(f"nixl cannot read the sender's memory: {err}") from err

    def _read(self, address: int, num_bytes: int) -> None:
        agent = self._agent
        here = agent.get_xfer_descs([(self._room.address, num_bytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._sender)
        give_up_s = time.monotonic() + _PULL_S
        state = agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > give_up_s:
                raise DeadlineExceeded(f"nixl read nothing of the sender's memory for {_PULL_S:g} s")
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise Unavailable(f"nixl gave up reading the sender's memory: {state}")


def _new_agent(*, has_progress_thread: bool) -> Any:
    """A sender needs the progress thread if software serves its memory; a receiver makes progress by polling."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as err:
        raise Incompatible(f"nixl is not installed: pip install 'halfmoon[nixl]' ({err})") from err
    config = nixl_agent_config(
        enable_prog_thread=has_progress_thread,
        backends=["UCX"],
        sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,  # several transfers pull at once, without any other lock
    )
    try:
        return nixl_agent(f"halfmoon-{uuid.uuid4().hex}", config)
    except Exception as err:  # the bindings have exception classes of their own
        raise Unavailable(f"nixl cannot work here: {err}") from err
