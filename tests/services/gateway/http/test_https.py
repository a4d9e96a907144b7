"""A gateway's HTTP under TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.http_context import client_context, unreached
from tests.services.gateway.fakes import MODEL, running_fleet


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, Any]:
    Authority.create(tmp_path / "authority").issue("gateway", "g", ("localhost", "127.0.0.1")).write(tmp_path)
    return {"http_tls_cert": tmp_path / "tls.crt", "http_tls_key": tmp_path / "tls.key"}


async def test_answers_stream_over_tls(tmp_path: Path, certificate: dict[str, Any]) -> None:
    trusted = client_context(tmp_path / "ca.crt", "https://gateway")
    assert trusted is not None
    async with running_fleet(tmp_path / "state", **certificate) as fleet:
        await fleet.pair()
        assert fleet.http.startswith("https://127.0.0.1:")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as session,
            session.post(f"{fleet.http}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            lines = [line async for line in response.content if line.startswith(b"data:")]
        assert len(lines) > 2
        assert lines[-1] == b"data: [DONE]\n"


async def test_plain_text_and_strangers_authorities_get_nothing(tmp_path: Path, certificate: dict[str, Any]) -> None:
    async with running_fleet(tmp_path / "state", **certificate) as fleet, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(fleet.http.replace("https", "http"))
        with pytest.raises(aiohttp.ClientConnectorCertificateError) as refused:
            await session.get(f"{fleet.http}/health")
    assert unreached(refused.value).endswith("; name its authority by --ca or HALFMOON_HTTP_CA")


@pytest.mark.parametrize("name", ["http_tls_cert", "http_tls_key"])
async def test_one_file_without_the_other(tmp_path: Path, certificate: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match="both --http-tls-cert and --http-tls-key"):
        async with running_fleet(tmp_path / "state", **{name: certificate[name]}):
            pass


async def test_a_silent_stranger_has_no_more_time_than_for_a_head(tmp_path: Path, certificate: dict[str, Any]) -> None:
    async with running_fleet(tmp_path / "state", header_timeout_s=0.3, **certificate) as fleet:
        host, _, port = fleet.http.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
