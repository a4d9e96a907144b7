"""Ranks on other hosts: they join rank 0 over TCP, and prove that they know its key before anything else is read.

A rank's process has three connections. Two carry what a local follower's pipes carry (`messages.py`); the third carries
nothing: its end tells the process that rank 0 is gone. **What follows the proof is plain text**, as are the exchanges
of `links.py` and NCCL's: it belongs on a network of one's own.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

import halfmoon
from halfmoon.engine.config import JoinedRanks
from halfmoon.errors import Incompatible, Unavailable

logger = logging.getLogger(__name__)

Pipe = Any  # a Connection; its type parameters differ between Python versions

_VERSION = halfmoon.__version__
_KINDS = ("steps", "copies", "life")
_PROOF_S = 10  # to answer a challenge
_LOG_EVERY_S = 30.0  # between two reminders that ranks are awaited
_SILENT_S = 20  # after which a host that does not acknowledge is lost


@dataclass(frozen=True, slots=True)
class Introduction:
    """First message on each connection of a rank's process."""

    version: str
    host: str  # a name that the processes of one host share
    process: str
    index: int  # among the ranks that its host offers
    kv_address: str  # HOST:PORT where ranks of other workers fetch KV
    kind: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0's answer to an introduction that it cannot take; None stands for one that it takes."""

    reason: str


class _Met(NamedTuple):
    introduction: Introduction
    address_here: str
    address_there: str
    connection: Pipe


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """The connections of one rank's process, on either side."""

    host: str
    index: int
    kv_address: str  # see `Introduction`
    address_here: str  # IP addresses of the two sides
    address_there: str
    steps: Pipe
    copies: Pipe
    life: Pipe

    def close(self) -> None:
        """Closes all; the process on the other side ends. Idempotent."""
        for connection in (self.steps, self.copies, self.life):
            connection.close()


def awaited_ranks(wanted: JoinedRanks) -> list[JoinedRank]:
    """Waits until `wanted.count` ranks have joined; those of one host follow each other. Raises Unavailable.

    Closing the process is the only way to end the wait.
    """
    try:
        listener = socket.create_server(_split(wanted.listen), family=_family(wanted.listen))
    except OSError as error:
        raise Unavailable(f"ranks of other hosts cannot join at {wanted.listen}: {error.strerror}") from error
    met: queue.SimpleQueue[_Met] = queue.SimpleQueue()
    with listener:
        threading.Thread(target=_accept, args=(listener, wanted.key, met), name="ranks", daemon=True).start()
        try:
            return _gathered(wanted, met)
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _gathered(wanted: JoinedRanks, met: queue.SimpleQueue[_Met]) -> list[JoinedRank]:
    parts: dict[str, dict[str, Pipe]] = {}  # by process
    whole: dict[str, JoinedRank] = {}
    logged_s = 0.0
    while True:
        alive = {name: rank for name, rank in whole.items() if not rank.life.poll()}  # readable only at its end
        for name in whole.keys() - alive.keys():
            whole.pop(name).close()
        by_host = Counter(rank.host for rank in whole.values())
        if len(whole) >= wanted.count:
            # hosts that offer most come first, so that few hosts have the ranks
            order = sorted(whole.values(), key=lambda rank: (-by_host[rank.host], rank.host, rank.index))
            for rank in order[wanted.count :]:
                rank.close()
            return order[: wanted.count]
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.info("ranks.awaited", extra={"address": wanted.listen, "missing": wanted.count - len(whole)})
        with suppress(queue.Empty):
            who, here, there, connection = met.get(timeout=1.0)
            mine = parts.setdefault(who.process, {})
            mine[who.kind] = connection
            if len(mine) == len(_KINDS):
                del parts[who.process]
                whole[who.process] = JoinedRank(who.host, who.index, who.kv_address, here, there, **mine)


def _accept(listener: socket.socket, key: bytes, met: queue.SimpleQueue[_Met]) -> None:
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return  # closed: all are there
        threading.Thread(target=_meet, args=(accepted, key, met), name="rank joins", daemon=True).start()


def _meet(accepted: socket.socket, key: bytes, met: queue.SimpleQueue[_Met]) -> None:
    here, there = accepted.getsockname()[0], accepted.getpeername()[0]
    connection = _connection(accepted)
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        introduction: Introduction = connection.recv()
        if introduction.version != halfmoon.__version__:
            text = f"the worker has Halfmoon {halfmoon.__version__}, and this host {introduction.version}"
            connection.send(Refused(f"{text}: install the same on each"))
            connection.close()
            return
        connection.send(None)
    except (OSError, EOFError, AuthenticationError) as error:
        logger.warning("rank.refused", extra={"address": there, "reason": str(error) or type(error).__name__})
        connection.close()
        return
    _wait_forever(connection)
    met.put(_Met(introduction, here, there, connection))


def join(address: str, key: bytes, host: str, process: str, index: int, kv_address: str) -> JoinedRank:
    """Joins the worker at `address` with one rank. Raises OSError while none listens, Unavailable, Incompatible."""
    connections: dict[str, Pipe] = {}
    try:
        with ExitStack() as opened:
            for kind in _KINDS:
                connected = socket.create_connection(_split(address), timeout=_PROOF_S)
                here, there = connected.getsockname()[0], connected.getpeername()[0]
                connection = connections[kind] = opened.enter_context(_connection(connected))
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                connection.send(Introduction(_VERSION, host, process, index, kv_address, kind))
                refused = connection.recv()
                if isinstance(refused, Refused):
                    raise Incompatible(refused.reason)
                _wait_forever(connection)
            opened.pop_all()
    except AuthenticationError as error:
        raise Unavailable(f"the worker at {address} has another cluster secret: copy its own to this host") from error
    except EOFError as error:
        raise ConnectionResetError("the worker ended the connection") from error
    return JoinedRank(host, index, kv_address, here, there, **connections)


def _connection(connected: socket.socket) -> Pipe:
    """The socket as a connection that fails where the other side is silent, now for seconds."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _end_if_silent(connected)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PROOF_S, 0))
    return Connection(connected.detach())


def end_silent_connections() -> None:
    """Makes all TCP connections of this process fail within seconds of their host's loss.

    Those of gloo, which has no setting for it, would wait for minutes.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connected:
            if connected.type == socket.SOCK_STREAM and connected.family in (socket.AF_INET, socket.AF_INET6):
                _end_if_silent(connected)


def _end_if_silent(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S // 4)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_S // 4)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)


def _wait_forever(connection: Pipe) -> None:
    with socket.socket(fileno=connection.fileno()) as borrowed:
        borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        borrowed.detach()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if address.startswith("[") else socket.AF_INET


def hosts_of(ranks: Sequence[JoinedRank]) -> list[tuple[int, int]]:
    """Each rank's position among those of its host, and their number."""
    totals = Counter(rank.host for rank in ranks)
    seen: Counter[str] = Counter()
    found = []
    for rank in ranks:
        found.append((seen[rank.host], totals[rank.host]))
        seen[rank.host] += 1
    return found
