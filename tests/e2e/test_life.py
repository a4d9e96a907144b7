"""Start and stop: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import psutil
import pytest

from tests.e2e.small_model import small_model
from tests.e2e.system import running_system, start_up

pytestmark = pytest.mark.e2e


def shared_memory() -> set[str]:
    """What nobody has any more: other tests may run beside this one."""
    there = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it ended, or is somebody else's
            there -= set(re.findall(r"/dev/shm/(\S+)$", maps.read_text(), re.MULTILINE))
    return {name for name in there if Path("/dev/shm", name).exists()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_stop_leaves_no_process_and_no_shared_memory(tmp_path: Path, number: signal.Signals) -> None:
    model = small_model(tmp_path / "small")
    before = shared_memory()
    async with running_system(tmp_path, "--both", "1", "--model", str(model)) as system:
        started = system.descendants()
        names = {Path(name).stem for name in os.listdir(tmp_path / "logs")}
        assert names == {"gateway", "kvstore", "planner", "both-0"}
        async with aiohttp.ClientSession(system.url) as http:
            body = {"model": "small", "prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
            async with http.post("/v1/completions", json=body) as response:
                await response.content.readline()  # busy when the signal comes
                system.process.send_signal(number)
                await asyncio.wait_for(system.process.wait(), 30)
        assert system.process.returncode == 0
    assert len(started) >= 4
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert shared_memory() <= before


async def test_a_second_signal_ends_even_a_service_that_hangs(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small")
    async with running_system(tmp_path, "--both", "1", "--drain-s", "3600", "--model", str(model)) as system:
        started = system.descendants()
        async with aiohttp.ClientSession(system.url) as http:
            body = {"model": "small", "prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
            async with http.post("/v1/completions", json=body) as response:
                await response.content.readline()
                for process in system.serving("both"):
                    process.suspend()
                system.process.send_signal(signal.SIGINT)
                while "Ctrl-C again" not in "".join(system.printed):
                    await asyncio.sleep(0)
                system.process.send_signal(signal.SIGINT)
                await asyncio.wait_for(system.process.wait(), 30)
        assert system.process.returncode == 0
    assert system.printed[-1] == "halfmoon ends at once"
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


async def test_services_stop_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    async with running_system(tmp_path, "--both", "1", "--model", str(small_model(tmp_path / "small"))) as system:
        started = system.descendants()
        system.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, started, 30)
        assert not alive


NUMBERS = {
    "type": "array",
    "minItems": 25,
    "maxItems": 25,
    "items": {"type": "integer", "minimum": 100, "maximum": 9999},
}
PLAIN = {"model": "demo", "prompt": "The moon is", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
CONSTRAINED = {
    "model": "demo",
    "prompt": "Numbers:",
    "max_tokens": 600,
    "seed": 4,
    "structured_outputs": {"json": NUMBERS},
}


async def whole(http: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    async with http.post("/v1/completions", json=body) as response:
        return str((await response.json())["choices"][0]["text"])


async def streamed(http: aiohttp.ClientSession, body: dict[str, Any], well_begun: asyncio.Event) -> str:
    parts: list[str] = []
    async with http.post("/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                parts.append(event["choices"][0]["text"])
            if len(parts) == 5:
                well_begun.set()
    return "".join(parts)


async def begun_streams(http: aiohttp.ClientSession, bodies: Sequence[dict[str, Any]]) -> list[asyncio.Task[str]]:
    """Streams of these requests, which have all well begun; on a busy machine one may have ended by then."""
    begun = [asyncio.Event() for _ in bodies]
    streams = [asyncio.create_task(streamed(http, body, one)) for body, one in zip(bodies, begun, strict=True)]
    for stream, one in zip(streams, begun, strict=True):
        await asyncio.wait((stream, asyncio.ensure_future(one.wait())), return_when=asyncio.FIRST_COMPLETED)
        if stream.done():
            stream.result()  # raises, if it failed
    return streams


async def test_a_killed_decode_worker_only_pauses_the_streams(tmp_path: Path) -> None:
    async with running_system(tmp_path, "--dtype", "float32") as system, aiohttp.ClientSession(system.url) as http:
        undisturbed = [*await asyncio.gather(*(whole(http, body) for body in (PLAIN, CONSTRAINED)))]
        streams = await begun_streams(http, (PLAIN, CONSTRAINED))
        (pid,) = [worker["pid"] for worker in await system.cluster(http) if worker["role"] == "decode"]
        assert not any(one.done() for one in streams)
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*streams) == undisturbed
        jsonschema.validate(json.loads(undisturbed[1]), NUMBERS)  # its automaton was made anew from the tokens
    assert any("Starting it again" in line for line in system.printed)


async def test_streams_go_on_at_a_decode_worker_that_restores_them(tmp_path: Path) -> None:
    """Handing over takes seconds here; what the prefill worker, the store or the other decode worker has is loaded."""
    text = "The moon rose over the quiet harbour, and the fishermen counted their boats before the tide. " * 12
    seeded = {"prompt": text[1:], "temperature": 0.9, "top_p": 0.9, "seed": 11, "logprobs": 2, "stop": ["nevermore"]}
    bodies = [PLAIN | {"prompt": text}, PLAIN | seeded, CONSTRAINED | {"prompt": f"{text} Numbers:"}]
    options = ("--dtype", "float32", "--decode", "2", "--set", "workers.prefill.kv_link_mbps=10")
    async with running_system(tmp_path, *options) as system, aiohttp.ClientSession(system.url) as http:
        undisturbed = [*await asyncio.gather(*(whole(http, body) for body in bodies))]
        streams = await begun_streams(http, bodies)
        async with http.get("/halfmoon/v1/placements?limit=1") as response:
            (serving,) = [placement["decode_worker"] for placement in await response.json()]
        (pid,) = [worker["pid"] for worker in await system.cluster(http) if worker["worker_id"] == serving]
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*streams) == undisturbed
        async with http.get("/halfmoon/v1/cache") as response:
            decisions = (await response.json())["decisions"]
    restored = [one for one in decisions if one["decision"] == "direct_restore" and one["reason"].startswith("kept_")]
    assert restored, decisions


async def test_a_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"is no (local )?directory"):
        async with running_system(tmp_path, "--model", str(tmp_path / "absent")):
            pass


async def test_a_stop_while_the_model_is_prepared_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CACHE_DIR", str(tmp_path / "cache"))
    process = await start_up(tmp_path / "state")
    assert process.stdout is not None
    assert b"converting" in await process.stdout.readline()
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    await asyncio.wait_for(process.communicate(), 30)
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, 5)
    assert started
    assert not alive
