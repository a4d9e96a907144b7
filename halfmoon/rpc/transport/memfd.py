"""Memory that two processes of one host share, without a name that could outlive them. Linux only.

The segment is a memfd: the kernel frees it with the last descriptor and mapping, however the processes end. Its
descriptor goes over a Unix socket in the abstract namespace, which has no file either. The connection stays open: when
one end dies, the other sees it close and releases the segment.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import mmap
import os
import secrets
import socket
import struct
from functools import cache
from pathlib import Path

from halfmoon.errors import Incompatible, Unavailable

_CONNECT_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # if its memory were cut off, a mapping would kill its reader


@cache
def host_id() -> str:
    """Equal in two processes of one machine and one network namespace, where abstract sockets reach each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.blake2b(f"{boot}/{os.stat('/proc/self/ns/net').st_ino}".encode(), digest_size=8).hexdigest()


class SharedSegment:
    """Owns one segment and hands its descriptor to processes of the same user. Created inside a running loop."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the system does not support it."""
        self.name = f"halfmoon-kv-{secrets.token_hex(16)}"
        self._loop = asyncio.get_running_loop()
        self._readers: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
            self._listener.setblocking(False)
            self._file, self.memory = _sealed(num_bytes)
        except OSError:
            self._listener.close()
            raise
        self._loop.add_reader(self._listener, self._hand_over)

    def close(self) -> None:
        """Closes the readers' connections; the memory goes when their mappings and ours are gone. Idempotent."""
        if self._file < 0:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for reader in list(self._readers):
            self._drop(reader)
        os.close(self._file)
        self._file = -1

    def _hand_over(self) -> None:
        try:
            reader, _ = self._listener.accept()
        except OSError:  # the reader is gone again, or too many files are open
            return
        reader.setblocking(False)
        if not _is_our_user(reader):
            reader.close()
            return
        try:
            socket.send_fds(reader, [b"\0"], [self._file])
        except OSError:
            reader.close()
            return
        self._readers.add(reader)
        self._loop.add_reader(reader, self._drop, reader)  # readers send nothing: readable means gone

    def _drop(self, reader: socket.socket) -> None:
        self._loop.remove_reader(reader)
        self._readers.discard(reader)
        reader.close()


def receive_segment(name: str) -> tuple[memoryview, socket.socket]:
    """The other end's segment, read-only, and the connection that lasts as long as its owner. Blocks for a moment.

    Raises Unavailable if it is not handed over, Incompatible if it comes from another user or could be cut short.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(f"\0{name}")
        if not _is_our_user(connection):
            raise Incompatible("the shared memory belongs to another user")
        _, files, _, _ = socket.recv_fds(connection, 1, 1)
        if not files:
            raise Unavailable("the sender did not hand its shared memory over")
        memory = _mapped(files[0])
        connection.setblocking(False)
    except BaseException as err:
        connection.close()
        if isinstance(err, (OSError, ValueError)):  # an empty segment cannot be mapped
            raise Unavailable(f"cannot get the sender's shared memory: {err}") from err
        raise
    return memory, connection


def _sealed(num_bytes: int) -> tuple[int, memoryview]:
    """A new segment's descriptor, and its memory."""
    file = os.memfd_create("halfmoon-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        return file, memoryview(mmap.mmap(file, num_bytes))
    except OSError:
        os.close(file)
        raise


def _mapped(file: int) -> memoryview:
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise Incompatible("the shared memory is not sealed: its owner could cut it short")
        return memoryview(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ))
    finally:
        os.close(file)


def _is_our_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
