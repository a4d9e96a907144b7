"""Connections in the backlog of a gateway that does not accept them."""

from __future__ import annotations

import os
import socket

import aiohttp
from aiohttp import web

from halfmoon.background import running
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


async def test_without_siblings_there_is_nothing_to_do() -> None:
    await SiblingBacklog(web.AppRunner(web.Application()), ()).accept()
