"""Which HTTP connections are open, and which one gives way when there are too many. Knows no sockets and no clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Generic, Literal, NamedTuple, TypeVar

Connection = TypeVar("Connection")
Bound = Literal["total", "client"]

_SITE_BITS = 64  # of an IPv6 address: who has one address has all of its site


class Admission(NamedTuple, Generic[Connection]):
    """What becomes of a new connection."""

    is_admitted: bool = True
    evicted: Connection | None = None  # the idle one to close for it
    bound: Bound | None = None  # the bound that was reached


@dataclass(slots=True)
class _Open(Generic[Connection]):
    """Some of the open connections."""

    num: int = 0
    silent: OrderedDict[Connection, None] = field(default_factory=OrderedDict)  # sent no whole request, oldest first
    idle: OrderedDict[Connection, None] = field(default_factory=OrderedDict)  # between requests, longest idle first

    def oldest(self) -> Connection | None:
        return next(iter(self.silent), None) or next(iter(self.idle), None)

    def note_busy(self, connection: Connection) -> None:
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)


class Connections(Generic[Connection]):
    """Owns the open connections, by client.

    Beyond a bound, a new connection takes the place of the one that has been silent longest, else of the one that has
    been idle longest, else it is refused: strangers who hold connections without a request shut nobody out.
    """

    def __init__(self, most: int, most_per_client: int) -> None:
        """`most_per_client` 0: no bound for one client."""
        self._most = most
        self._most_per_client = most_per_client
        self._all: _Open[Connection] = _Open()
        self._clients: dict[str, _Open[Connection]] = {}
        self._client_of: dict[Connection, str] = {}

    def __len__(self) -> int:
        return self._all.num

    def admit(self, connection: Connection, address: str, *, is_last: bool = False) -> Admission[Connection]:
        """Takes a new connection, unless it is refused. `is_last`: the process can hardly open another one."""
        client = _client(address)
        own = self._clients.get(client)
        bound: Bound | None = None
        evicted: Connection | None = None
        if own is not None and 0 < self._most_per_client <= own.num:
            bound, evicted = "client", own.oldest()
        elif is_last or self._all.num >= self._most:
            bound, evicted = "total", self._all.oldest()
        if bound is not None and evicted is None:
            return Admission(is_admitted=False, bound=bound)
        if evicted is not None:
            self.forget(evicted)
        for opened in (self._all, self._clients.setdefault(client, _Open())):
            opened.num += 1
            opened.silent[connection] = None
        self._client_of[connection] = client
        return Admission(evicted=evicted, bound=bound)

    def note_busy(self, connection: Connection) -> None:
        """A request has come on it."""
        for opened in self._of(connection):
            opened.note_busy(connection)

    def note_idle(self, connection: Connection) -> None:
        """Its request has been answered."""
        for opened in self._of(connection):
            opened.idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed. May be called again."""
        for opened in self._of(connection):
            opened.num -= 1
            opened.note_busy(connection)
        client = self._client_of.pop(connection, None)
        if client is not None and not self._clients[client].num:
            del self._clients[client]

    def _of(self, connection: Connection) -> tuple[_Open[Connection], ...]:
        client = self._client_of.get(connection)
        return () if client is None else (self._all, self._clients[client])


def _client(address: str) -> str:
    """What counts as one client: an IPv4 address, or the site of an IPv6 address."""
    if ":" not in address:
        return address
    parsed = ip_address(address.partition("%")[0])
    assert isinstance(parsed, IPv6Address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return f"{int(parsed) >> (128 - _SITE_BITS):x}/{_SITE_BITS}"
