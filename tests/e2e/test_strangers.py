"""Strangers, and services that overstep their role, against a whole system on its real ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from halfmoon.errors import AlreadyHere, Forbidden, HalfmoonError, Incompatible, Unauthenticated, Unavailable
from halfmoon.pb import decode_pb2, gateway_pb2, kvstore_pb2, prefill_pb2, types_pb2
from halfmoon.pb.decode_pb2_grpc import DecodeStub
from halfmoon.pb.gateway_pb2_grpc import ClusterStub
from halfmoon.pb.kvstore_pb2_grpc import KVStoreAdminStub, KVStoreStub
from halfmoon.pb.prefill_pb2_grpc import PrefillStub
from halfmoon.rpc.credentials.credential import Credential, credential_from, new_secret
from halfmoon.rpc.credentials.operator_token import kept_token
from halfmoon.rpc.credentials.refusals import NEEDS_CREDENTIAL
from halfmoon.rpc.credentials.roles import CALLERS, CLUSTER_ROLES, ClusterRole
from halfmoon.rpc.peer import Peer
from halfmoon.up.specs.stores import known_stores
from tests.e2e.system import System, running_system

DEADLINE_S = 30.0
SERVERS: dict[Any, ClusterRole] = {
    ClusterStub: "gateway",
    PrefillStub: "worker",
    DecodeStub: "worker",
    KVStoreStub: "store",
    KVStoreAdminStub: "store",
}


@dataclass(frozen=True)
class Victim:
    """A system with one worker of each role, and where its services listen."""

    system: System
    state_dir: Path
    workers: list[dict[str, Any]]
    fingerprint: str
    gateway: str
    planner: str
    store: str

    def credential(self, role: ClusterRole) -> Credential:
        return credential_from((self.state_dir / "cluster_secret").read_text(), role)

    def worker(self, role: str) -> dict[str, Any]:
        return next(one for one in self.workers if one["role"] == role)

    def identity(self, **changes: object) -> gateway_pb2.WorkerIdentity:
        """What an attacker would register with: everything is as a real worker has it."""
        real = self.worker("prefill")
        fields = {
            "worker_id": "fake",
            "role": types_pb2.PREFILL,
            "address": "127.0.0.1:9",
            "model": real["model"],
            "model_fingerprint": self.fingerprint,
            "layout": types_pb2.KVLayout(**real["layout"]),
            "context_tokens": real["context_tokens"],
            "total_blocks": real["total_blocks"],
            "kv_frame_version": 1,
            "profile": gateway_pb2.LatencyProfile(kind="fast", prefill=[1e-9] * 3, step=[1e-9] * 3),
        }
        return gateway_pb2.WorkerIdentity(**{**fields, **changes})


def _operator(state_dir: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {kept_token(state_dir)}"}


def _address(state_dir: Path, service: str) -> str:
    events = map(json.loads, (state_dir / "logs" / f"{service}.log").read_text().splitlines())
    return str(next(event["address"] for event in events if event.get("event") == "service.ready"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def victim(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Victim]:
    state_dir = tmp_path_factory.mktemp("victim")
    async with (
        running_system(state_dir, "--engine", "sim", "--sim-profile", "instant", "--api-key", "K") as system,
        aiohttp.ClientSession(system.url) as http,
        http.get("/halfmoon/v1/cluster", headers=_operator(state_dir)) as response,
    ):
        cluster = await response.json()
        (store,) = known_stores(state_dir)
        addresses = _address(state_dir, "gateway"), _address(state_dir, "planner"), store
        yield Victim(system, state_dir, cluster["workers"], cluster["model_fingerprint"], *addresses)


async def _error_of(work: Coroutine[Any, Any, Any]) -> HalfmoonError:
    with pytest.raises(HalfmoonError) as caught:
        await work
    return caught.value


async def _unary(address: str, credential: Credential | None, stub: Any, name: str, request: Any) -> Any:
    async with Peer(address, credential, SERVERS[stub]) as peer:
        return await peer.call(getattr(stub(peer.channel), name), request, deadline_s=DEADLINE_S)


async def _first(address: str, credential: Credential | None, stub: Any, name: str, request: Any) -> Any:
    async with (
        Peer(address, credential, SERVERS[stub]) as peer,
        peer.stream(getattr(stub(peer.channel), name), request, deadline_s=DEADLINE_S) as messages,
    ):
        async for message in messages:
            return message
    return None


async def _registered(victim: Victim, credential: Credential | None, **changes: object) -> Any:
    message = gateway_pb2.WorkerMessage(identity=victim.identity(**changes), process_key=b"the attacker's")

    async def messages() -> AsyncIterator[gateway_pb2.WorkerMessage]:
        yield message
        await asyncio.sleep(DEADLINE_S)

    while True:
        try:
            return await _first(victim.gateway, credential, ClusterStub, "Register", messages())
        except Unavailable as error:
            if "error from Core" not in error.message:
                raise  # else the refusal overtook the message, and gRPC tells of the write that failed


@pytest.mark.parametrize("credential", [None, credential_from(new_secret(), "worker")], ids=["none", "foreign"])
async def test_no_method_of_any_service_is_open(victim: Victim, credential: Credential | None) -> None:
    """Whatever is sent, to whatever port: also to the raw data channels, and to services that do not listen there."""
    ports = {victim.gateway, victim.planner, victim.store, *(one["address"] for one in victim.workers)}
    for address in ports:
        async with grpc.aio.insecure_channel(address) as channel:
            for method in CALLERS:
                metadata = credential.metadata("gateway") if credential else ()
                call = channel.unary_unary(method)(b"\xff", metadata=metadata, timeout=DEADLINE_S)
                assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAUTHENTICATED, NEEDS_CREDENTIAL)


async def test_a_strangers_registration_teaches_nothing(victim: Victim) -> None:
    for changes in ({"model_fingerprint": "guessed"}, {"layout": types_pb2.KVLayout()}, {}):
        error = await _error_of(_registered(victim, None, **changes))
        assert (type(error), error.message) == (Unauthenticated, NEEDS_CREDENTIAL)
    for role in set(CLUSTER_ROLES) - {"worker"}:
        assert isinstance(await _error_of(_registered(victim, victim.credential(role))), Forbidden)


async def test_a_worker_is_told_why_it_does_not_fit(victim: Victim) -> None:
    error = await _error_of(_registered(victim, victim.credential("worker"), model_fingerprint="other"))
    assert isinstance(error, Incompatible)
    assert victim.fingerprint in error.message


async def test_nobody_takes_a_worker_id_over(victim: Victim) -> None:
    worker_id = victim.worker("prefill")["worker_id"]
    error = await _error_of(_registered(victim, victim.credential("worker"), worker_id=worker_id))
    assert (type(error), error.message) == (AlreadyHere, "this worker id is taken")
    async with aiohttp.ClientSession(headers=_operator(victim.state_dir)) as http:
        assert {one["worker_id"] for one in await victim.system.cluster(http)} >= {worker_id}


@pytest.mark.parametrize("role", [None, "worker", "store", "operator"])
async def test_answers_are_for_their_gateway(victim: Victim, role: ClusterRole | None) -> None:
    credential = None if role is None else victim.credential(role)
    refused = Unauthenticated if role is None else Forbidden
    address = victim.worker("decode")["address"]
    tokens = decode_pb2.TokensRequest(gateway_id="gateway-guessed")
    cancel = decode_pb2.CancelRequest(request_ids=["r"])
    assert isinstance(await _error_of(_first(address, credential, DecodeStub, "Tokens", tokens)), refused)
    assert isinstance(await _error_of(_unary(address, credential, DecodeStub, "Cancel", cancel)), refused)
    prompt = prefill_pb2.PrefillRequest(decode_address="evil.example:1")
    address = victim.worker("prefill")["address"]
    assert isinstance(await _error_of(_first(address, credential, PrefillStub, "Prefill", prompt)), refused)


@pytest.mark.parametrize("role", ["worker", "gateway", "store", "planner"])
async def test_the_stores_admin_is_the_operators(victim: Victim, role: ClusterRole) -> None:
    requests = {
        "List": kvstore_pb2.ListRequest(),
        "Drop": kvstore_pb2.DropRequest(ids=[bytes(24)]),
        "Pin": kvstore_pb2.PinRequest(ids=[bytes(24)]),
        "Verify": kvstore_pb2.VerifyRequest(),
    }
    for name, request in requests.items():
        work = _unary(victim.store, victim.credential(role), KVStoreAdminStub, name, request)
        assert isinstance(await _error_of(work), Forbidden)
        await _unary(victim.store, victim.credential("operator"), KVStoreAdminStub, name, request)


@asynccontextmanager
async def listening_stranger() -> AsyncIterator[tuple[str, list[str]]]:
    """A host that is no member: its address, and who connected."""
    came: list[str] = []

    def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(str(writer.get_extra_info("peername")))
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", came


async def test_a_prompts_kv_goes_to_members_alone(victim: Victim) -> None:
    """Even a gateway cannot send it elsewhere: the worker believes those gateways that it has dialled itself."""
    sampling = types_pb2.SamplingParams(max_tokens=4, top_p=1.0, repetition_penalty=1.0)
    generation = types_pb2.Generation(
        request_id="r", model_fingerprint=victim.fingerprint, prompt_token_ids=[5, 6], sampling=sampling
    )
    async with listening_stranger() as (evil, came):
        request = prefill_pb2.PrefillRequest(generation=generation, decode_address=evil)
        address = victim.worker("prefill")["address"]
        error = await _error_of(_first(address, victim.credential("gateway"), PrefillStub, "Prefill", request))
        assert isinstance(error, Unavailable)
        assert "no gateway of this worker has a member" in error.message
        assert came == []


@pytest.mark.parametrize(
    ("role", "refused"),
    [(None, Unauthenticated), ("worker", Forbidden), ("operator", Forbidden), ("gateway", Forbidden)],
)
async def test_a_store_dials_only_other_stores(
    victim: Victim, role: ClusterRole | None, refused: type[HalfmoonError]
) -> None:
    credential = None if role is None else victim.credential(role)
    async with listening_stranger() as (evil, came):
        layout = types_pb2.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=64)
        request = kvstore_pb2.ReplicateRequest(source=evil, keys=[bytes(16)], layout=layout)
        assert isinstance(await _error_of(_unary(victim.store, credential, KVStoreStub, "Replicate", request)), refused)
        assert came == []


async def test_no_process_shows_the_secret_and_only_up_has_it(victim: Victim) -> None:
    file = victim.state_dir / "cluster_secret"
    assert file.stat().st_mode & 0o777 == 0o600
    secret = file.read_text().strip()
    children = victim.system.descendants()
    assert len(children) >= 4
    for child in children:
        assert secret not in " ".join((*child.cmdline(), *child.environ().values()))
        assert "halfmoon-credential" not in " ".join(child.cmdline())
    assert _found(secret, (victim.state_dir / "logs").iterdir()) == []
    tokens = [token for role in CLUSTER_ROLES for token in victim.credential(role).tokens.values()]
    assert [token for token in tokens if _found(token, (victim.state_dir / "logs").iterdir())] == []


def _found(text: str, files: Iterable[Path]) -> list[Path]:
    return [file for file in files if text in file.read_text()]
