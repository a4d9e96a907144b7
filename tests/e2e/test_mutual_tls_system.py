"""Real services of `halfmoon up --tls-dir`: served requests, refused strangers, certificates that change under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from halfmoon.errors import Forbidden, HalfmoonError, Unavailable
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.credentials.credential import Credential, credential_from, credential_of_certificate
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.credentials.sources import client_credential, state_secret
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.identity_files import identity_files, paths_in
from halfmoon.up.specs.stores import known_stores
from halfmoon.up.state.certificates import RoleCertificates
from tests.e2e.system import System, running_system

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

_TOKENS = 40
_PATIENCE_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    Authority.create(directory / "authority")
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(state: Path) -> AsyncIterator[System]:
    options = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--tls-dir", str(state / "authority"))
    async with running_system(state, *options) as found:
        yield found


async def generate(session: aiohttp.ClientSession, number: int) -> int:
    """The number of tokens of one streamed answer. Raises if it is not whole."""
    body = {"model": "demo", "prompt": f"{number} " * 200, "max_tokens": _TOKENS, "stream": True}
    options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    async with session.post("/v1/completions", json={**body, **options}) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content]
    assert not [line for line in lines if b'"error"' in line]
    return sum(b'"text"' in line for line in lines)


async def list_blocks(state: Path, credential: Credential | None) -> None:
    (store,) = known_stores(state)
    async with Peer(store, credential, "store") as peer:
        await peer.call(kvstore_pb2_grpc.KVStoreAdminStub(peer.channel).List, kvstore_pb2.ListRequest(), deadline_s=20)


def of_up(state: Path, role: ClusterRole) -> Credential:
    credential = client_credential(role, "127.0.0.1:1", state, {})
    assert credential is not None
    assert credential.tls is not None
    return credential


async def test_a_request_is_served(system: System) -> None:
    async with aiohttp.ClientSession(system.url) as session:
        assert await generate(session, 0) > 0


async def test_strangers_and_workers_do_not_reach_the_stores_admin(system: System, state: Path) -> None:
    await list_blocks(state, of_up(state, "operator"))
    Authority.create(state / "foreign").issue("operator", "o").write(state / "foreign")
    foreign = credential_of_certificate(identity_files(paths_in(state / "foreign"), "operator"))
    secret = credential_from(state_secret(state), "operator")
    cases: list[tuple[Credential | None, type[HalfmoonError]]] = [
        (None, Unavailable),  # plain text
        (secret, Unavailable),  # plain text with the right secret
        (foreign, Unavailable),
        (replace(secret, tls=foreign.tls), Unavailable),
        (of_up(state, "worker"), Forbidden),
        (replace(secret, tls=of_up(state, "worker").tls), Forbidden),  # a stolen token beside one's own certificate
    ]
    for credential, kind in cases:
        with pytest.raises(HalfmoonError) as refusal:
            await list_blocks(state, credential)
        assert type(refusal.value) is kind


async def test_certificates_change_under_load_and_nothing_is_lost(system: System, state: Path) -> None:
    certificates = RoleCertificates(state / "authority", state)
    gateway = state / "logs" / "gateway.log"
    async with aiohttp.ClientSession(system.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        numbers = iter(range(1, 10_000))
        is_over = asyncio.Event()
        served: list[int] = []

        async def client() -> None:
            while not is_over.is_set():
                served.append(await generate(session, next(numbers)))

        async with asyncio.TaskGroup() as clients:
            for _ in range(6):
                clients.create_task(client())
            for change in (1, 2, 3):
                await asyncio.to_thread(certificates.issue)
                async with asyncio.timeout(_PATIENCE_S):
                    while gateway.read_text().count("tls.new_certificate") < change:
                        await asyncio.sleep(0.1)
                so_far = len(served)
                async with asyncio.timeout(_PATIENCE_S):
                    while len(served) < so_far + 6:
                        await asyncio.sleep(0.1)
            is_over.set()
    assert min(served) > 0
    await list_blocks(state, of_up(state, "operator"))
    assert "worker.left" not in gateway.read_text()
