"""Hosts of the cluster, and the speeds that their workers measured."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.pb.gateway_pb2 import LinkSpeed, WorkerLoad
from halfmoon.pb.types_pb2 import DECODE
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.telemetry import host_links
from services.gateway.telemetry.host_links import Host, HostLink, hosts_of
from tests.services.gateway.cluster.test_membership import identity
from tests.services.gateway.fakes import FINGERPRINT


def link(address: str, gb_per_s: float, latency_s: float = 0.001, *, is_inbound: bool = False) -> LinkSpeed:
    return LinkSpeed(address=address, bandwidth_bytes_per_s=gb_per_s * 1e9, latency_s=latency_s, is_inbound=is_inbound)


def members(*links: Sequence[LinkSpeed]) -> list[Member]:
    """A prefill worker on alpha and two decode workers on beta, with what each of them has measured."""
    membership = Membership(FINGERPRINT, 1.0)
    found = [
        membership.join(identity("p0", address="10.0.0.1:1", host="alpha"), 0.0),
        membership.join(identity("d0", address="10.0.0.2:1", host="beta", role=DECODE), 0.0),
        membership.join(identity("d1", address="10.0.0.2:2", host="beta", role=DECODE), 0.0),
    ]
    for member, measured in zip(found, links, strict=False):
        membership.report(member, WorkerLoad(links=measured), 1.0)
    return found


def test_workers_and_stores_are_on_the_hosts_that_they_name() -> None:
    hosts = hosts_of(members(), ["10.0.0.2:7003", "10.0.0.9:7003"]).hosts
    assert hosts == [
        Host("10.0.0.9", ["10.0.0.9"], {}, ["10.0.0.9:7003"]),
        Host("alpha", ["10.0.0.1"], {"prefill": 1}, []),
        Host("beta", ["10.0.0.2"], {"decode": 2}, ["10.0.0.2:7003"]),
    ]


def test_a_worker_that_names_no_host_is_on_that_of_its_address() -> None:
    member = Membership(FINGERPRINT, 1.0).join(identity(address="10.0.0.7:1"), 0.0)
    assert [host.name for host in hosts_of([member], ()).hosts] == ["10.0.0.7"]


def test_links_between_hosts_are_medians_of_their_workers() -> None:
    sent = [link("10.0.0.2:1", 1.0, 0.001), link("10.0.0.2:2", 3.0, 0.003)]
    loaded = [link("10.0.0.1:1", 0.5, is_inbound=True)]  # from alpha, as beta measured it
    inside = [link("10.0.0.2:1", 5.0)]
    unmeasured = [link("10.0.0.1:1", 0.0)]
    found = hosts_of(members(sent, loaded + unmeasured, inside), ()).links
    assert found == [HostLink("alpha", "beta", 1e9, 0.001, 3), HostLink("beta", "beta", 5e9, 0.001, 1)]


def test_of_very_many_links_a_sample_is_read() -> None:
    measured = [link("10.0.0.2:1", 1.0)] * (2 * host_links._MAX_READ)
    (found,) = hosts_of(members(measured), ()).links
    assert found == HostLink("alpha", "beta", 1e9, 0.001, host_links._MAX_READ)
