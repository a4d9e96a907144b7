"""TLS of HTTP: certificates that change while the server serves, trust, and old versions."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.processes.private_files import write_private
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.http_context import client_context, server_context, unreached


@asynccontextmanager
async def served(context: ssl.SSLContext) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def certificate(port: int, context: ssl.SSLContext | None, name: str = "localhost") -> bytes:
    """The certificate that the server shows. Raises ssl.SSLError if it is not trusted."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context or True, server_hostname=name)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


def der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority")


async def test_a_new_certificate_is_used_and_a_broken_one_is_not(authority: Authority, tmp_path: Path) -> None:
    first, second = (authority.issue("gateway", "g", ("localhost",)) for _ in range(2))
    first.write(tmp_path)
    trusting = client_context(tmp_path / "ca.crt", "https://gateway.example")
    async with served(server_context(tmp_path / "tls.crt", tmp_path / "tls.key", check_s=0)) as port:
        assert await certificate(port, trusting) == der(first.cert)
        write_private(tmp_path / "tls.crt", second.cert)  # its key is not there yet
        assert await certificate(port, trusting) == der(first.cert)
        write_private(tmp_path / "tls.key", second.key)
        assert await certificate(port, trusting) == der(second.cert)


async def test_why_a_server_was_not_reached(authority: Authority, tmp_path: Path) -> None:
    authority.issue("gateway", "g", ("gateway.example",)).write(tmp_path)
    trusting = client_context(tmp_path / "ca.crt", "https://gateway.example")
    async with served(server_context(tmp_path / "tls.crt", tmp_path / "tls.key")) as port:
        with pytest.raises(ssl.SSLError) as unknown:
            await certificate(port, None)
        with pytest.raises(ssl.SSLError) as misnamed:
            await certificate(port, trusting, "other.example")
    assert "name its authority by --ca" in unreached(unknown.value)
    assert "--ca" not in unreached(misnamed.value)
    assert unreached(TimeoutError()) == "timed out"


async def test_who_is_trusted(authority: Authority, tmp_path: Path) -> None:
    authority.issue("gateway", "g", ("gateway.example",)).write(tmp_path)
    foreign = tmp_path / "foreign"
    Authority.create(foreign)
    async with served(server_context(tmp_path / "tls.crt", tmp_path / "tls.key")) as port:
        for trusted in ("ca.crt", "tls.crt"):
            context = client_context(tmp_path / trusted, "https://gateway.example")
            await certificate(port, context, "gateway.example")
            with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
                await certificate(port, context, "localhost")
            await certificate(port, client_context(tmp_path / trusted, "https://127.0.0.1:1"), "localhost")
        for stranger in (client_context(foreign / "ca.crt", "https://127.0.0.1:1"), client_context(None, "https://x")):
            with pytest.raises(ssl.SSLCertVerificationError):
                await certificate(port, stranger)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_versions_of_tls_are_refused(authority: Authority, tmp_path: Path) -> None:
    authority.issue("gateway", "g").write(tmp_path)
    context = client_context(tmp_path / "ca.crt", "https://localhost")
    assert context is not None
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    server = server_context(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert server.minimum_version is ssl.TLSVersion.TLSv1_2
    async with served(server) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)) as refusal:
            await certificate(port, context)
        assert "NO_CIPHERS" not in str(refusal.value)  # this side offered something


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    authority.issue("gateway", "g").write(tmp_path)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    with pytest.raises(InvalidRequest, match="No such file"):
        server_context(cert, tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="not PEM"):
        server_context(cert, cert)
    key.write_bytes(authority.issue("gateway", "g").key)
    with pytest.raises(InvalidRequest, match="not the certificate's"):
        server_context(cert, key)
    with pytest.raises(InvalidRequest, match="no certificates to trust"):
        client_context(key, "https://x")
