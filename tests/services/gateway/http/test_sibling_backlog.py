"""Connections in the backlog of a gateway that does not accept them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import aiohttp
from aiohttp import web

from halfmoon.background import running
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.http_context import client_context, server_context
from services.gateway.http.sibling_backlog import SiblingBacklog


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def test_a_sibling_answers_what_a_dead_gateway_left_waiting() -> None:
    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as of_the_dead:
        url = f"http://127.0.0.1:{of_the_dead.getsockname()[1]}"
        backlog = SiblingBacklog(runner, (os.dup(of_the_dead.fileno()),))
        async with running(backlog.accept()), aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.get(url, headers={"Connection": "close"}) as response:
                    assert await response.text() == "hello"
    await runner.cleanup()


async def test_a_stranger_who_does_not_finish_a_tls_handshake_holds_up_nobody(tmp_path: Path) -> None:
    Authority.create(tmp_path / "authority").issue("gateway", "g", ("127.0.0.1",)).write(tmp_path)
    tls = server_context(tmp_path / "tls.crt", tmp_path / "tls.key")
    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as of_the_dead:
        place = of_the_dead.getsockname()
        trusted = client_context(tmp_path / "ca.crt", "https://127.0.0.1")
        assert trusted is not None
        backlog = SiblingBacklog(runner, (os.dup(of_the_dead.fileno()),), tls, 60.0)
        with socket.create_connection(place):
            async with (
                running(backlog.accept()),
                aiohttp.ClientSession() as session,
                session.get(f"https://127.0.0.1:{place[1]}", ssl=trusted, headers={"Connection": "close"}) as response,
            ):
                assert await response.text() == "hello"
    await runner.cleanup()


async def test_without_siblings_there_is_nothing_to_do() -> None:
    await SiblingBacklog(web.AppRunner(web.Application()), ()).accept()
