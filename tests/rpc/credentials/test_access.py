"""The check of every call: the table, and what strangers and the wrong callers are told over a real channel."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

import halfmoon.pb
from halfmoon.errors import Forbidden, HalfmoonError, InvalidRequest, Unauthenticated
from halfmoon.pb import decode_pb2, decode_pb2_grpc
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential, credential_from
from halfmoon.rpc.credentials.listeners import check_listener
from halfmoon.rpc.credentials.operator_token import OperatorToken
from halfmoon.rpc.credentials.refusals import NEEDS_CREDENTIAL, RefusalLog
from halfmoon.rpc.credentials.roles import CALLERS, CLUSTER_ROLES, ClusterRole, may_call
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.status import in_our_tree
from halfmoon.rpc.store.block_streams import BYTES_SERVICE
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transfer import KV_TRANSFER, PUSH, raw_service
from halfmoon.rpc.transport.rank_fetches import BYTES_SERVICE as RANK_BYTES_SERVICE

SECRET = "s" * 40
WORKER = credential_from(SECRET, "worker")
GATEWAY = credential_from(SECRET, "gateway")
STRANGER = credential_from("t" * 40, "gateway")


def defined_methods() -> set[str]:
    """Every method of the .proto files, and the raw ones."""
    files = [path.stem for path in Path(halfmoon.pb.__path__[0]).glob("*_pb2.py")]
    services = [
        service
        for file in files
        for service in importlib.import_module(f"halfmoon.pb.{file}").DESCRIPTOR.services_by_name.values()
    ]
    named = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    raw = {f"/{KV_TRANSFER}/{PUSH}", f"/{BYTES_SERVICE}/Put", f"/{BYTES_SERVICE}/Get", f"/{RANK_BYTES_SERVICE}/Read"}
    return named | raw


def test_the_table_has_every_method_and_no_other() -> None:
    assert set(CALLERS) == defined_methods()
    assert all(callers <= set(CLUSTER_ROLES) and callers for callers in CALLERS.values())


def test_a_method_that_the_table_lacks_is_nobodys() -> None:
    assert not [role for role in CLUSTER_ROLES if may_call(role, "/halfmoon.Decode/Surprise")]


@pytest.mark.parametrize(
    ("role", "method", "is_allowed"),
    [
        ("worker", "/halfmoon.Cluster/Register", True),
        ("gateway", "/halfmoon.Cluster/Register", False),
        ("worker", "/halfmoon.KVStoreAdmin/Drop", False),
        ("gateway", "/halfmoon.KVStoreAdmin/List", False),
        ("operator", "/halfmoon.KVStoreAdmin/Drop", True),
        ("worker", "/halfmoon.Decode/Tokens", False),
        ("operator", "/halfmoon.Decode/Tokens", False),
        ("gateway", "/halfmoon.Decode/Tokens", True),
        ("worker", "/halfmoon.Prefill/Prefill", False),
        ("gateway", "/halfmoon.KVTransfer/Push", False),
        ("worker", "/halfmoon.KVStore/Replicate", False),
        ("store", "/halfmoon.KVStoreBytes/Get", True),
        ("store", "/halfmoon.KVStoreBytes/Put", False),
        ("gateway", "/halfmoon.KVStoreBytes/Get", False),
        ("console", "/halfmoon.Planner/Plan", False),
        ("planner", "/halfmoon.Fleet/Change", True),
        ("operator", "/halfmoon.Fleet/Change", False),
    ],
)
def test_roles_have_what_they_need_and_no_more(role: ClusterRole, method: str, is_allowed: bool) -> None:
    assert may_call(role, method) == is_allowed


class Decode(decode_pb2_grpc.DecodeServicer):
    """Answers everybody who gets through to it."""

    Settle = Find = Adopt = EmptyCache = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.num_calls = 0

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelResponse:
        self.num_calls += 1
        return decode_pb2.CancelResponse(num_cancelled=len(request.request_ids))

    async def Tokens(self, request: decode_pb2.TokensRequest, context: Any) -> AsyncIterator[decode_pb2.StepTokens]:
        self.num_calls += 1
        yield decode_pb2.StepTokens()

    async def push(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.num_calls += 1
        async for message in messages:
            yield message


class Served:
    """A worker's server that checks its callers."""

    def __init__(self, port: int, decode: Decode, registry: CollectorRegistry) -> None:
        self.address = f"127.0.0.1:{port}"
        self.decode = decode
        self.registry = registry

    async def errors(self, credential: Credential | None) -> list[HalfmoonError | None]:
        """How a unary call, a stream and a raw stream end for this caller."""
        async with Peer(self.address, credential, "worker") as peer:
            return [await _error_of(work) for work in (_unary(peer), _stream(peer), _raw(peer))]


async def _unary(peer: Peer) -> None:
    request = decode_pb2.CancelRequest(request_ids=["a"])
    await peer.call(decode_pb2_grpc.DecodeStub(peer.channel).Cancel, request, deadline_s=30)


async def _stream(peer: Peer) -> None:
    method = decode_pb2_grpc.DecodeStub(peer.channel).Tokens
    async with peer.stream(method, decode_pb2.TokensRequest(), deadline_s=30) as steps:
        assert len([step async for step in steps]) == 1


async def _raw(peer: Peer) -> None:
    call = peer.raw_stream(f"/{KV_TRANSFER}/{PUSH}", deadline_s=30)
    with in_our_tree(peer.address):
        await call.done_writing()
        assert [message async for message in call] == []


async def _error_of(work: Coroutine[Any, Any, None]) -> HalfmoonError | None:
    try:
        await work
    except HalfmoonError as error:
        return error
    return None


@asynccontextmanager
async def served(access: CallAccess) -> AsyncIterator[Served]:
    decode, registry = Decode(), CollectorRegistry()
    services = (
        lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(decode, server),
        raw_service(KV_TRANSFER, {PUSH: decode.push}),
    )
    async with running_server("127.0.0.1:0", services, RpcMetrics(registry), grace_s=0, access=access) as server:
        await server.set_serving()
        yield Served(server.port, decode, registry)


@pytest.mark.parametrize("credential", [None, STRANGER], ids=["none", "of another cluster"])
async def test_strangers_reach_no_handler_of_any_kind(credential: Credential | None) -> None:
    async with served(CallAccess(WORKER)) as it:
        found = await it.errors(credential)
        assert [type(error) for error in found] == [Unauthenticated] * 3
        assert {error.message for error in found if error} == {NEEDS_CREDENTIAL}
        assert it.decode.num_calls == 0
        assert it.registry.get_sample_value("halfmoon_rpc_refused_total", {"status": "UNAUTHENTICATED"}) == 3.0


async def test_a_known_role_is_told_that_it_may_not() -> None:
    async with served(CallAccess(WORKER)) as it:
        for_gateway, for_worker = await it.errors(GATEWAY), await it.errors(WORKER)
    assert [type(error) for error in for_gateway] == [type(None), type(None), Forbidden]
    assert [type(error) for error in for_worker] == [Forbidden, Forbidden, type(None)]


async def test_without_a_credential_everybody_may_call_as_before() -> None:
    async with served(CallAccess()) as it:
        assert await it.errors(None) == await it.errors(STRANGER) == [None] * 3


async def test_strangers_learn_no_methods_and_no_message_is_parsed() -> None:
    async with served(CallAccess(WORKER)) as it, Peer(it.address) as peer:
        for method in ("/halfmoon.Decode/Cancel", "/halfmoon.Decode/Nothing", "/x", "/grpc.health.v1.Healthy/Check"):
            call = peer.channel.unary_unary(method)(b"\xff no protobuf", timeout=30)
            assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAUTHENTICATED, NEEDS_CREDENTIAL)
        assert it.decode.num_calls == 0


async def test_anybody_may_ask_for_health() -> None:
    async with served(CallAccess(WORKER)) as it, Peer(it.address) as peer:
        check = health_pb2_grpc.HealthStub(peer.channel).Check
        response = await peer.call(check, health_pb2.HealthCheckRequest(), deadline_s=30)
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_the_operator_token_is_as_good_as_the_role() -> None:
    access = CallAccess(credential_from(SECRET, "planner"), OperatorToken("token"))
    bearer = (("authorization", "Bearer token"),)
    assert access.refusal("/halfmoon.Planner/Plan", bearer) is None
    assert access.refusal("/halfmoon.Planner/Plan", credential_from(SECRET, "operator").metadata("planner")) is None
    assert isinstance(access.refusal("/halfmoon.Fleet/Change", bearer), Forbidden)
    assert isinstance(access.refusal("/halfmoon.Planner/Plan", (("authorization", "Bearer wrong"),)), Unauthenticated)
    assert isinstance(access.refusal("/halfmoon.Planner/Plan", (("halfmoon-credential", "token"),)), Unauthenticated)


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", "[::]:7000", "10.0.0.1:0", "gateway:7000", ":7000"])
async def test_what_strangers_can_reach_needs_a_secret(listen: str) -> None:
    with pytest.raises(InvalidRequest, match="HALFMOON_CLUSTER_SECRET_FILE") as caught:
        async with running_server(listen, [], RpcMetrics(CollectorRegistry())):
            pass
    assert caught.value.param == "listen"
    check_listener(listen, WORKER)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:7000", "localhost:1", "unix:/tmp/x"])
def test_on_this_machine_it_does_not(listen: str) -> None:
    check_listener(listen, None)


@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost", "7001", "127.0.0.1:x", "127.0.0.1:99999", "::1", ""])
def test_what_is_no_address_is_called_so(listen: str) -> None:
    for credential in (WORKER, None):
        with pytest.raises(InvalidRequest, match="is not an address: give HOST:PORT"):
            check_listener(listen, credential)


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = RefusalLog(lambda: now_s)
    for second in range(25):
        now_s = float(second)
        for _ in range(100):
            refusals.note(Unauthenticated("x"), "ipv4:10.0.0.1:7")
    lines = [record.__dict__["num_refused"] for record in caplog.records if record.message == "rpc.refused"]
    assert lines == [1, 1000, 1000]
