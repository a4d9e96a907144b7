"""The gateway as a service: settings, health, control API, metrics, shutdown."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import ValidationError

from halfmoon import __version__
from halfmoon.errors import InvalidRequest
from halfmoon.ledger.ledger import open_ledger
from halfmoon.pb.gateway_pb2 import LinkSpeed, WorkerLoad
from halfmoon.rpc.service import read_settings
from halfmoon.up.specs.service_specs import http_url
from halfmoon.up.up_options import UpOptions
from services.gateway import service
from services.gateway.service import running_gateway
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet, served_model, soon

LINK = LinkSpeed(address="10.0.0.1:7002", bandwidth_bytes_per_s=2e9, latency_s=0.25)
HI: list[Any] = [{"role": "user", "content": "hi"}]


async def get(fleet: Fleet, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(fleet.http + path) as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.text()


async def test_health_says_what_is_missing(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        assert await get(fleet, "/health") == (
            503,
            {"status": "unavailable", "missing": ["prefill worker", "decode worker"]},
        )
        await fleet.add("p0", "prefill")
        assert await get(fleet, "/health") == (503, {"status": "unavailable", "missing": ["decode worker"]})
        await fleet.add("d0", "decode")
        assert await get(fleet, "/health") == (200, {"status": "ok", "missing": []})
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both")
        assert (await get(fleet, "/health"))[0] == (await get(fleet, "/ping"))[0] == 200
        assert await get(fleet, "/version") == (200, {"version": __version__})


async def test_the_control_api(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, worker = await fleet.pair()
        worker.loads.put_nowait(WorkerLoad(sequence=3, num_running=2, free_blocks=40, links=[LINK]))
        async with asyncio.timeout(20):
            while fleet.cluster.worker("d0").member.load.sequence != 3:  # noqa: ASYNC110 (a report is no event)
                await asyncio.sleep(0)
        status, cluster = await get(fleet, "/halfmoon/v1/cluster?max_links=1")
        _, without_links = await get(fleet, "/halfmoon/v1/cluster")
        assert (await get(fleet, "/halfmoon/v1/cluster?max_links=-1"))[0] == 400
        _, metrics = await get(fleet, "/metrics")
    assert status == 200
    assert (cluster["model"], cluster["served_model"], cluster["context_tokens"]) == ("byte-model", MODEL, 200)
    assert cluster["uptime_s"] >= 0
    first, second = cluster["workers"]
    assert (first["worker_id"], first["role"], second["role"]) == ("p0", "prefill", "decode")
    assert (second["address"], second["device"], second["pid"]) == (worker.address, "fake", 7)
    assert second["total_blocks"] == 100
    assert second["load"]["free_blocks"] == 40
    assert set(second["load"]) == {field.name for field in WorkerLoad.DESCRIPTOR.fields} - {
        "links",
        "steps",
        "decisions",
    }
    assert second["links"] == [{"address": "10.0.0.1:7002", "bytes_per_s": 2e9, "latency_s": 0.25}]
    assert [one["links"] for one in without_links["workers"]] == [[], []]
    assert 'halfmoon_worker_num_running{role="decode",worker_id="d0"} 2.0' in metrics
    assert 'halfmoon_rpc_in_flight{method="/halfmoon.Cluster/Register"} 2.0' in metrics


async def test_every_request_leaves_one_row_and_its_metrics(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello", cached_tokens=2))
        await fleet.client.chat.completions.create(model=MODEL, messages=HI)
        with pytest.raises(openai.BadRequestError):
            await fleet.client.completions.create(model=MODEL, prompt="")
        _, metrics = await get(fleet, "/metrics")
        for limit in ("0", "x", "1001", "-1", "", "%C2%B2", "0000001000000", "1" * 30, "1" * 5000):
            assert (await get(fleet, f"/halfmoon/v1/requests?limit={limit}"))[0] == 400
        assert (await get(fleet, "/halfmoon/v1/requests?limit=0001000"))[0] == 200
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        rejected, good = await ledger.recent(10)
    assert (rejected.endpoint, rejected.status, rejected.http_status) == ("completions", "rejected", 400)
    assert rejected.error == "the prompt is empty"
    assert (good.endpoint, good.status, good.http_status, good.error) == ("chat.completions", "ok", 200, None)
    assert (good.model, good.prompt_tokens, good.cached_tokens, good.output_tokens) == (MODEL, 8, 2, 6)
    assert (good.finish_reason, good.prefill_worker, good.decode_worker) == ("stop", "p0", "d0")
    assert good.queue_s == 0.25
    assert good.ttft_s is not None
    assert good.mean_tbt_s is not None
    assert good.e2e_s >= good.ttft_s
    assert 'requests_total{endpoint="chat.completions",http_status="200",status="ok"} 1.0' in metrics
    assert "halfmoon_gateway_ttft_seconds_count 1.0" in metrics
    assert 'halfmoon_ledger_rows_total{result="lost"} 0.0' in metrics
    assert "halfmoon_gateway_tbt_seconds_count 5.0" in metrics
    assert "halfmoon_gateway_output_tokens_total 6.0" in metrics


async def test_at_the_end_running_streams_get_an_error_event(tmp_path: Path) -> None:
    async def read(stream: openai.AsyncStream[ChatCompletionChunk], begun: asyncio.Event) -> None:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                begun.set()

    begun = asyncio.Event()
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello", asyncio.Event()))
        stream = await fleet.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        reading = asyncio.ensure_future(read(stream, begun))
        await soon(begun.wait())
        stopping = asyncio.ensure_future(fleet.stop())
        with pytest.raises(openai.APIError, match="shutting down"):
            await soon(reading)
        await soon(stopping)
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        (row,) = await ledger.recent(10)
    assert (row.status, row.http_status, row.error) == ("error", 503, "the gateway is shutting down")


async def test_at_the_end_a_stream_between_two_workers_gets_an_error_event(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, failover_wait_s=300) as fleet:
        worker = await fleet.add("b0", "both", Script("hello", asyncio.Event()))
        stream = await fleet.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        while not (await soon(anext(stream))).choices[0].delta.content:
            pass
        worker.end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        stopping = asyncio.ensure_future(fleet.stop())
        with pytest.raises(openai.APIError, match="shutting down"):
            await soon(anext(stream))
        await soon(stopping)


async def test_at_the_end_running_streams_may_finish_and_new_requests_may_not(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path, drain_s=30) as fleet:
        _, decode = await fleet.pair(Script("hello", gate))
        whole = asyncio.ensure_future(fleet.client.chat.completions.create(model=MODEL, messages=HI))
        async with asyncio.timeout(20):
            while not decode.decoding:  # noqa: ASYNC110 (the fake has no event for it)
                await asyncio.sleep(0)
        assert await get(fleet, "/load") == (200, {"server_load": 1})
        stopping = asyncio.ensure_future(fleet.stop())
        async with asyncio.timeout(20):
            while (await get(fleet, "/health"))[1]["status"] != "stopping":
                pass
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            await fleet.client.chat.completions.create(model=MODEL, messages=HI)
        assert caught.value.status_code == 503
        gate.set()
        assert (await soon(whole)).choices[0].message.content == "hello"
        await soon(stopping)


async def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        port = int(fleet.http.rpartition(":")[2])
        for taken in (
            GatewaySettings(port=port, slo="off"),
            GatewaySettings(port=0, cluster_listen=fleet.gateway.address, slo="off"),
        ):
            settings = taken.model_copy(update={"state_dir": tmp_path})
            with pytest.raises(InvalidRequest, match="cannot listen"):
                async with running_gateway(settings, served_model()):
                    pass


@pytest.mark.parametrize(
    ("host", "answers"), [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fd00::1", "[fd00::1]")]
)
def test_the_url_of_a_gateway_is_one_at_which_it_answers(host: str, answers: str, tmp_path: Path) -> None:
    """On `::` it listens to IPv6 alone."""
    settings = GatewaySettings(host=host, state_dir=tmp_path)
    assert service._url(settings, 8000) == http_url(UpOptions(host=host), 8000) == f"http://{answers}:8000"


async def test_a_gateway_may_end_as_soon_as_it_listens(tmp_path: Path) -> None:
    async with running_gateway(GatewaySettings(port=0, state_dir=tmp_path, slo="off"), served_model()):
        pass


def test_settings_come_from_environment_and_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFMOON_GATEWAY_PORT", "81")
    monkeypatch.setenv("HALFMOON_GATEWAY_MODEL_NAME", "served")
    settings = read_settings(
        GatewaySettings, ["--port", "82", "--state-dir", str(tmp_path), "--cluster-listen", "127.0.0.1:0"]
    )
    assert (settings.port, settings.model_name, settings.advertise_cluster) == (82, "served", None)
    assert settings.ledger == f"sqlite:///{tmp_path / 'ledger.db'}"
    with pytest.raises(ValidationError):
        settings.port = 5  # type: ignore[misc]
    secret = read_settings(GatewaySettings, ["--ledger-url", "postgresql://me:secret@host/db"])
    assert "secret" not in str(secret.as_logged())


def test_unknown_settings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, ["--no-such-option", "1"])
    monkeypatch.setenv("HALFMOON_GATEWAY_PROT", "81")
    with pytest.raises(InvalidRequest, match="HALFMOON_GATEWAY_PROT"):
        read_settings(GatewaySettings, [])


async def test_the_program_says_when_it_cannot_start(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "services.gateway",
        "--model",
        str(tmp_path / "none"),
        "--state-dir",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFMOON_")}
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b'"service.failed"' in errors
    assert b"Traceback" not in errors
