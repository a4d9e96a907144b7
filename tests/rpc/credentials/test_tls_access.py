"""Services on mutual TLS: who is let in by certificate, by certificate and secret, and who by neither."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import Forbidden, HalfmoonError, InvalidRequest, Unauthenticated, Unavailable
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential, credential_from, credential_of_certificate
from halfmoon.rpc.credentials.listeners import check_listener
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.credentials.sources import client_credential, own_credential
from halfmoon.rpc.health_probe import probe
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, identity_files, paths_in, state_paths

SECRET = "s" * 40


class Certificates:
    """Issues certificates of one authority to directories of a test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._authority = Authority.create(directory / "authority")

    def environment(self, role: str) -> dict[str, str]:
        directory = self.directory / role
        self._authority.issue(role, role).write(directory)
        return dict(zip(TLS_VARIABLES, map(str, paths_in(directory)), strict=True))

    def credential(self, role: str) -> Credential:
        self.environment(role)
        return credential_of_certificate(identity_files(paths_in(self.directory / role), role))

    def with_secret(self, role: ClusterRole, token_role: ClusterRole | None = None) -> Credential:
        """Certificate of one role, token of perhaps another."""
        return replace(credential_from(SECRET, token_role or role), tls=self.credential(role).tls)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


class Admin(kvstore_pb2_grpc.KVStoreAdminServicer):
    """Drops; the other methods are not called."""

    List = Pin = Verify = Empty = None  # type: ignore[assignment]

    async def Drop(self, request: kvstore_pb2.DropRequest, context: Any) -> kvstore_pb2.DropResponse:
        return kvstore_pb2.DropResponse(num_dropped=7)


@asynccontextmanager
async def store(credential: Credential) -> AsyncIterator[str]:
    def add(server: Any) -> None:
        kvstore_pb2_grpc.add_KVStoreAdminServicer_to_server(Admin(), server)

    metrics = RpcMetrics(CollectorRegistry())
    async with running_server("127.0.0.1:0", [add], metrics, grace_s=0, access=CallAccess(credential)) as server:
        await server.set_serving()
        yield f"127.0.0.1:{server.port}"


async def drop(address: str, credential: Credential | None, server_role: ClusterRole = "store") -> int:
    async with Peer(address, credential, server_role) as peer:
        stub = kvstore_pb2_grpc.KVStoreAdminStub(peer.channel)
        answer: kvstore_pb2.DropResponse = await peer.call(stub.Drop, kvstore_pb2.DropRequest(), deadline_s=20)
        return answer.num_dropped


async def refusal(address: str, credential: Credential | None, kind: type[HalfmoonError]) -> str:
    with pytest.raises(kind) as error:
        await drop(address, credential)
    assert type(error.value) is kind
    return error.value.message


async def test_the_certificates_role_decides(certificates: Certificates, tmp_path: Path) -> None:
    async with store(certificates.credential("store")) as address:
        assert await drop(address, certificates.credential("operator")) == 7
        message = await refusal(address, certificates.credential("worker"), Forbidden)
        assert message == "a worker may not call /halfmoon.KVStoreAdmin/Drop"
        await refusal(address, certificates.credential("king"), Unauthenticated)
        await refusal(address, None, Unavailable)  # plain text
        await refusal(address, Certificates(tmp_path / "others").credential("operator"), Unavailable)
        await refusal(address, credential_from(SECRET, "operator"), Unavailable)  # no certificate


async def test_nothing_is_parsed_before_the_role_is_known(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with store(certificates.credential("store")) as address:
        for role, kind in (("worker", Forbidden), ("king", Unauthenticated), ("operator", InvalidRequest)):
            async with Peer(address, certificates.credential(role), "store") as peer:
                garbage = peer.channel.unary_unary("/halfmoon.KVStoreAdmin/Drop")
                with pytest.raises(kind):
                    await peer.call(garbage, b"\xff", deadline_s=20)
    assert not [record for record in caplog.records if record.exc_info]


async def test_with_a_secret_too_both_must_agree(certificates: Certificates) -> None:
    async with store(certificates.with_secret("store")) as address:
        assert await drop(address, certificates.with_secret("operator")) == 7
        for other in ("worker", "operator"):
            own, token = ("worker", "operator") if other == "worker" else ("operator", "worker")
            message = await refusal(address, certificates.with_secret(own, token), Forbidden)  # type: ignore[arg-type]
            assert "different roles" in message or "a worker may not" in message
        await refusal(address, certificates.credential("operator"), Unauthenticated)  # a certificate alone
        foreign = replace(credential_from("t" * 40, "operator"), tls=certificates.credential("operator").tls)
        await refusal(address, foreign, Unauthenticated)


async def test_the_certificates_end_is_a_metric(certificates: Certificates) -> None:
    registry, credential = CollectorRegistry(), certificates.credential("store")
    assert credential.tls is not None
    async with running_server("127.0.0.1:0", [], RpcMetrics(registry), grace_s=0, access=CallAccess(credential)):
        shown = registry.get_sample_value("halfmoon_rpc_certificate_expires_seconds")
    assert shown == credential.tls.current.expires_s > 0


async def test_a_server_of_another_role_gets_no_call(certificates: Certificates) -> None:
    async with store(certificates.credential("worker")) as address:
        with pytest.raises(Unavailable):
            await drop(address, certificates.credential("operator"), "store")


async def test_the_health_probe_uses_the_services_own_certificate(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(certificates.with_secret("store")) as address:
        with pytest.raises(Unavailable):
            await probe(address, deadline_s=20)
        for name, value in certificates.environment("store").items():
            monkeypatch.setenv(name, value)
        assert await probe(address, deadline_s=20) == "SERVING"


def test_the_environment_names_secret_and_certificate(certificates: Certificates) -> None:
    files = certificates.environment("store")
    both = own_credential("store", {**files, "HALFMOON_CLUSTER_SECRET": SECRET})
    alone = own_credential("store", files)
    assert both is not None
    assert both.tls is not None
    assert both.metadata("gateway")
    assert alone is not None
    assert alone.tls is not None
    assert not alone.metadata("gateway")
    with pytest.raises(InvalidRequest, match="is for the role store, and this is a worker"):
        own_credential("worker", files)
    with pytest.raises(InvalidRequest, match="needs three files"):
        own_credential("store", {TLS_VARIABLES[0]: files[TLS_VARIABLES[0]]})


def test_commands_find_the_certificates_of_up(certificates: Certificates, tmp_path: Path) -> None:
    certificates.directory = tmp_path / "tls"
    certificates.credential("operator")
    assert state_paths(tmp_path, "operator").cert.exists()
    own = client_credential("operator", "127.0.0.1:1", tmp_path, {})
    assert own is not None
    assert own.tls is not None
    assert client_credential("operator", "store.example:1", tmp_path, {}) is None


def test_a_certificate_is_enough_to_listen_everywhere(certificates: Certificates) -> None:
    check_listener("0.0.0.0:1", certificates.credential("store"))
    with pytest.raises(InvalidRequest, match="halfmoon certs"):
        check_listener("0.0.0.0:1", None)
