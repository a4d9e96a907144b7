"""The hosts of the cluster: what is on each of them, and how fast KV travels between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from halfmoon.pb.gateway_pb2 import LinkSpeed
from services.gateway.cluster.member import Member

_MAX_READ = 20_000  # links between workers; a sample of more is read, since operators ask again every few seconds
_MAX_SHOWN = 256  # links between hosts


class Host(NamedTuple):
    """One host and what is on it."""

    name: str
    addresses: list[str]
    num_workers: dict[str, int]  # by role
    stores: list[str]  # addresses of stores there


class HostLink(NamedTuple):
    """Medians of what workers measured between two hosts, or inside of one."""

    source: str  # names of hosts
    target: str
    bytes_per_s: float
    latency_s: float
    num_links: int  # between processes


class Hosts(NamedTuple):
    """All hosts by name, and the slowest links between them."""

    hosts: list[Host]
    links: list[HostLink]


def hosts_of(members: Sequence[Member], stores: Iterable[str]) -> Hosts:
    """Returns the hosts of these workers and of the stores at these addresses.

    A store is on the host whose workers have its address; without any, the address is the host's name.
    """
    names = {_machine(member.identity.address): member.host for member in members}
    names |= {member.identity.address: member.host for member in members}
    addresses: dict[str, set[str]] = defaultdict(set)
    num_workers: dict[str, Counter[str]] = defaultdict(Counter)
    stores_on: dict[str, list[str]] = defaultdict(list)
    for member in members:
        addresses[member.host].add(_machine(member.identity.address))
        num_workers[member.host][member.role] += 1
    for store in sorted(stores):
        name = _name(store, names)
        addresses[name].add(_machine(store))
        stores_on[name].append(store)
    hosts = [Host(name, sorted(addresses[name]), dict(num_workers[name]), stores_on[name]) for name in addresses]
    return Hosts(sorted(hosts), host_links(members, names))


def host_links(members: Sequence[Member], names: Mapping[str, str]) -> list[HostLink]:
    """Returns the measured links between hosts, slowest first. `names`: see `_name`."""
    stride = -(-sum(len(member.load.links) for member in members) // _MAX_READ) or 1
    measured: dict[tuple[str, str], list[LinkSpeed]] = defaultdict(list)
    for member in members:
        for link in member.load.links[::stride]:
            if link.bandwidth_bytes_per_s > 0:
                other = _name(link.address, names)
                pair = (other, member.host) if link.is_inbound else (member.host, other)
                measured[pair].append(link)
    links = [
        HostLink(
            source,
            target,
            median(link.bandwidth_bytes_per_s for link in found),
            median(link.latency_s for link in found),
            len(found),
        )
        for (source, target), found in measured.items()
    ]
    return sorted(links, key=lambda link: link.bytes_per_s)[:_MAX_SHOWN]


def _name(address: str, names: Mapping[str, str]) -> str:
    """Name of the host of host:port, by that address, or else by its host's part, which may be all that is known."""
    return names.get(address) or names.get(_machine(address), _machine(address))


def _machine(address: str) -> str:
    """The host's part of host:port."""
    return address.rpartition(":")[0]
