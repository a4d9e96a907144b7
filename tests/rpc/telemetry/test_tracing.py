"""Traces: off without an endpoint, exported to a real receiver with one, and never in anybody's way."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: pip install -e '.[tracing]'")

from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.pb import decode_pb2, decode_pb2_grpc
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.telemetry.spans import NO_SPAN, NO_TRACER, current_span, operation, span_scope
from halfmoon.rpc.telemetry.tracing import tracing
from tests.rpc.otlp_receiver import detached, running_receiver

ROOT = Path(__file__).parents[3]
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "10"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)


class Refusing(decode_pb2_grpc.DecodeServicer):
    """Refuses, and does a part of it as a span of its own."""

    Settle = Find = Adopt = EmptyCache = None  # type: ignore[assignment]

    async def Tokens(
        self, request: decode_pb2.TokensRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepTokens]:
        raise NotFound("nobody asks for them")
        yield

    async def Cancel(
        self, request: decode_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.CancelResponse:
        with operation(current_span().child("looking")):
            raise NoCapacity("there is no room")


def test_without_an_endpoint_opentelemetry_is_never_imported() -> None:
    code = """
import sys
import halfmoon.rpc.service
from halfmoon.rpc.telemetry.tracing import tracing
with tracing("gateway", None, {}) as tracer:
    assert not tracer.request("chat", {}, 0.0, {}).is_recording
sys.exit(any(name.partition(".")[0] == "opentelemetry" for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    files = [file for room in ("halfmoon", "services", "console") for file in (ROOT / room).rglob("*.py")]
    imports = re.compile(r"^\s*(import|from) opentelemetry", re.MULTILINE)
    assert [file.name for file in files if imports.search(file.read_text())] == ["otlp.py"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_what_turns_it_off(environment: Mapping[str, str]) -> None:
    with tracing("gateway", None, environment) as tracer:
        assert tracer is NO_TRACER


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be http://host:port"), tracing("gateway", "localhost:4317", {}):
        pass


async def test_a_call_continues_its_callers_trace_and_says_how_it_ended() -> None:
    async with running_receiver() as receiver:
        with tracing("gateway", receiver.url) as gateway, tracing("decode", receiver.url) as decode:
            add = lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(Refusing(), server)  # noqa: E731
            async with (
                running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry()), tracer=decode) as server,
                Peer(f"127.0.0.1:{server.port}") as peer,
            ):
                ask = decode_pb2_grpc.DecodeStub(peer.channel).Cancel
                with pytest.raises(NoCapacity):  # outside of any trace: no span
                    await peer.call(ask, decode_pb2.CancelRequest(), deadline_s=30)
                root = gateway.request("chat demo", {"traceparent": CLIENT}, time.monotonic() - 1, {"a": 1})
                with pytest.raises(NoCapacity), operation(root):
                    await peer.call(ask, decode_pb2.CancelRequest(), deadline_s=30)
                spans = await receiver.until(lambda came: len(came) >= 3)
    by_name = {one.name: one for one in spans}
    assert {one.span.trace_id.hex() for one in spans} == {CLIENT.split("-")[1]}
    assert detached(spans, bytes.fromhex(CLIENT.split("-")[2])) == []
    assert by_name["halfmoon.Decode/Cancel"].service == "halfmoon-decode"
    assert by_name["halfmoon.Decode/Cancel"].error == "RESOURCE_EXHAUSTED"
    assert by_name["looking"].error == by_name["chat demo"].error == "there is no room"
    began = by_name["chat demo"].span
    assert began.end_time_unix_nano - began.start_time_unix_nano >= 1e9


async def test_a_long_tracestate_of_a_client_fails_no_call_behind_it() -> None:
    async with running_receiver() as receiver:
        with tracing("gateway", receiver.url) as tracer:
            add = lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(Refusing(), server)  # noqa: E731
            async with (
                running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry()), tracer=tracer) as server,
                Peer(f"127.0.0.1:{server.port}") as peer,
            ):
                ask = decode_pb2_grpc.DecodeStub(peer.channel).Cancel
                for state in ("vendor=1", ",".join(f"v{number}={'x' * 250}" for number in range(31))):
                    root = tracer.request(
                        "chat", {"traceparent": CLIENT, "tracestate": state}, time.monotonic(), {"length": len(state)}
                    )
                    with pytest.raises(NoCapacity, match="there is no room"), operation(root):
                        await peer.call(ask, decode_pb2.CancelRequest(), deadline_s=30)
                    kept = dict(root.headers).get("tracestate")
                    assert kept == (state if len(state) < 100 else None)


async def test_what_the_client_does_not_sample_is_not_recorded_anywhere() -> None:
    async with running_receiver() as receiver:
        with tracing("gateway", receiver.url) as tracer:
            unsampled = tracer.request("chat", {"traceparent": CLIENT[:-1] + "0"}, time.monotonic(), {})
            with span_scope(unsampled):
                assert not current_span().child("attempt").is_recording
                assert dict(current_span().headers)["traceparent"].endswith("-00")
            unsampled.end()
            tracer.request("sampled", {}, time.monotonic(), {}).end()
            spans = await receiver.until(bool)
    assert [one.name for one in spans] == ["sampled"]


async def test_a_receiver_that_does_not_answer_holds_up_nobody() -> None:
    async with running_receiver() as receiver:
        receiver.gate = asyncio.Event()
        with tracing("gateway", receiver.url) as tracer:
            for number in range(5_000):  # more than the queue holds
                tracer.request(f"request {number}", {}, time.monotonic(), {}).end()
            await receiver.has_been_called.wait()
            tracer.request("the last", {}, time.monotonic(), {}).end()
        receiver.gate.set()


async def test_a_receiver_that_is_not_there_holds_up_nobody() -> None:
    with tracing("gateway", "http://127.0.0.1:9") as tracer:
        span = tracer.request("chat", {}, time.monotonic(), {})
        assert span.is_recording
        span.end(error="cancelled")
        span.end()  # a second end is nothing


def test_no_span_does_nothing() -> None:
    assert NO_SPAN.child("x").headers == ()
    NO_SPAN.event("x", 0.0)
    NO_SPAN.end()
