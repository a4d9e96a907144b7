"""A server and its clients on mutual TLS: who is let in, and certificates that change under running calls."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from halfmoon.rpc.processes.private_files import write_private
from halfmoon.rpc.tls.authority import Authority, IssuedCertificate
from halfmoon.rpc.tls.channel import TlsChannel
from halfmoon.rpc.tls.identity_files import IdentityFiles, TlsPaths, identity_files
from halfmoon.rpc.tls.server_credentials import caller_role, server_credentials

Files = Callable[..., IdentityFiles]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    def made(role: str, issued: IssuedCertificate | None = None) -> IdentityFiles:
        (issued or authority.issue(role, role)).write(tmp_path / role)
        paths = TlsPaths(*(tmp_path / role / name for name in ("tls.crt", "tls.key", "ca.crt")))
        return identity_files(paths, role, check_s=0)

    return made


class _Roles(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """/t/role answers the caller's role, /t/echo streams what it gets."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def role(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return caller_role(context.auth_context()).encode()

        async def echo(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for message in messages:
                yield message

        if details.method == "/t/role":
            return grpc.unary_unary_rpc_method_handler(role)
        return grpc.stream_stream_rpc_method_handler(echo)


@asynccontextmanager
async def served(files: IdentityFiles) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Roles(),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def role_seen(channel: Any) -> bytes:
    answer: bytes = await channel.unary_unary("/t/role")(b"", timeout=20)
    return answer


async def refused(channel: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await role_seen(channel)
    await channel.close()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(failure.value.details())


async def test_the_servers_see_the_callers_role(files: Files) -> None:
    async with served(files("store")) as address:
        for role in ("worker", "operator"):
            channel = TlsChannel(address, files(role), "store", ())
            assert await role_seen(channel) == role.encode()
            await channel.close()


async def test_strangers_do_not_get_through_the_handshake(files: Files, authority: Authority, tmp_path: Path) -> None:
    foreign = Authority.create(tmp_path / "other").issue("operator", "o")
    async with served(files("store")) as address:
        await refused(grpc.aio.insecure_channel(address))
        await refused(_channel(address, authority.pem))
        await refused(_channel(address, authority.pem, foreign))
        expired = authority.issue("operator", "o", days=1e-9)
        await refused(_channel(address, authority.pem, expired))


async def test_a_server_of_another_role_or_authority_is_not_spoken_to(
    files: Files, authority: Authority, tmp_path: Path
) -> None:
    async with served(files("worker")) as address:
        assert "Hostname Verification" in await refused(TlsChannel(address, files("gateway"), "store", ()))
        anyone = TlsChannel(address, files("gateway"), None, ())
        assert await role_seen(anyone) == b"gateway"
        await anyone.close()
        await refused(_channel(address, Authority.create(tmp_path / "other").pem))


async def test_certificates_change_under_running_calls(files: Files, authority: Authority, tmp_path: Path) -> None:
    server, client = files("store"), files("worker")
    async with served(server) as address:
        channel = TlsChannel(address, client, "store", ())
        stream = channel.stream_stream("/t/echo")(timeout=60)
        await stream.write(b"before")
        assert await stream.read() == b"before"
        # another authority takes over: first both are trusted, then all have certificates of the new one
        other = Authority.create(tmp_path / "other")
        for role in ("store", "worker"):
            old = authority.issue(role, role)
            old._replace(ca=authority.pem + other.pem).write(tmp_path / role)
        assert await role_seen(channel) == b"worker"
        for role in ("store", "worker"):
            other.issue(role, role)._replace(ca=authority.pem + other.pem).write(tmp_path / role)
            assert await role_seen(channel) == b"worker"
        for role in ("store", "worker"):
            write_private(tmp_path / role / "ca.crt", other.pem)
            assert await role_seen(channel) == b"worker"
        await stream.write(b"after")
        assert await stream.read() == b"after"  # the old connection is not broken off
        await refused(_channel(address, authority.pem + other.pem, authority.issue("worker", "w")))
        ended = asyncio.ensure_future(channel.close())
        await asyncio.wait_for(ended, 20)
        assert stream.done()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_versions_of_tls_are_refused(files: Files, authority: Authority) -> None:
    async with served(files("store")) as address:
        host, _, port = address.partition(":")
        context = ssl.create_default_context(cadata=authority.pem.decode())
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)) as refusal:
            await asyncio.open_connection(host, int(port), ssl=context, server_hostname="halfmoon.internal")
        assert "NO_CIPHERS" not in str(refusal.value)  # this side offered something


def _channel(address: str, ca: bytes, issued: IssuedCertificate | None = None) -> grpc.aio.Channel:
    pair = (issued.key, issued.cert) if issued else (None, None)
    options = (("grpc.ssl_target_name_override", "halfmoon.internal"),)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *pair), options=options)
