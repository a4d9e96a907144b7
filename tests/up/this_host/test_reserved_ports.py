"""Who may listen on a reserved port, and who may not get it."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.up.this_host.reserved_ports import ReservedPorts, check_free

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is not held")


async def test_a_service_listens_on_it_again_and_again_and_alone() -> None:
    with ReservedPorts() as ports:
        address = ports.address()
        for _ in range(2):
            async with running_server(address, [], RpcMetrics(CollectorRegistry())) as server:
                assert server.port == int(address.rpartition(":")[2])
                with pytest.raises(InvalidRequest, match="taken"):
                    async with running_server(address, [], RpcMetrics(CollectorRegistry())):
                        pass


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", ""])
def test_several_that_share_a_port_may_listen_on_it(host: str) -> None:
    with ReservedPorts() as ports:
        port = ports.port(host)
        family = socket.getaddrinfo(host or None, port, flags=socket.AI_PASSIVE)[0][0]
        for _ in range(2):
            with socket.create_server((host, port), family=family, reuse_port=True):
                pass


@linux
def test_nobody_gets_it_who_does_not_name_it_to_listen() -> None:
    with ReservedPorts() as ports:
        port = ports.port()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_what_is_no_address_of_this_host_is_refused() -> None:
    with ReservedPorts() as ports, pytest.raises(InvalidRequest, match=r"192\.0\.2\.1"):
        ports.port("192.0.2.1")


def test_a_listening_socket_keeps_connections_whose_acceptor_died() -> None:
    with ReservedPorts() as ports:
        port = ports.port()
        ((descriptor,),) = ports.listening("127.0.0.1", port, 1)
        with socket.socket(fileno=os.dup(descriptor)) as dying:
            client = socket.create_connection(("127.0.0.1", port))
            assert dying.getsockname()[1] == port
        with socket.socket(fileno=os.dup(descriptor)) as successor, client:
            accepted, _ = successor.accept()
            with accepted:
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"


def test_another_system_does_not_share_the_port_unnoticed() -> None:
    with ReservedPorts() as ports, ReservedPorts() as others:
        port = ports.port()
        assert len(ports.listening("127.0.0.1", port, 2)) == 2
        with pytest.raises(InvalidRequest, match="in use"):
            others.listening("127.0.0.1", port, 2)


def test_a_port_in_use_is_refused_with_the_reason() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ReservedPorts() as ports,
        pytest.raises(InvalidRequest, match="in use: give another port by --port"),
    ):
        ports.listening("127.0.0.1", taken.getsockname()[1], 2)


def test_a_port_is_looked_at_before_others_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match="give another port by --console-port"):
            check_free("127.0.0.1", port, "console_port")
    check_free("127.0.0.1", port, "console_port")


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", ""])
def test_every_address_of_a_host_is_listened_on(host: str) -> None:
    with ReservedPorts() as ports:
        port = ports.port(host)
        (descriptors,) = ports.listening(host, port, 1)
        families = {family for family, *_ in socket.getaddrinfo(host or None, port, flags=socket.AI_PASSIVE)}
        assert len(descriptors) == len(families)


def test_listening_at_an_unknown_name_says_so() -> None:
    with ReservedPorts() as ports, pytest.raises(InvalidRequest, match=r"cannot listen on nosuch\.invalid:8000"):
        ports.listening("nosuch.invalid", 8000, 1)
