"""The console's pages against a small fake gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.cluster_page import used_share  # noqa: E402
from console.gateway_api import GatewayApi, GatewayError  # noqa: E402
from console.requests_page import median  # noqa: E402
from console.settings import DEFAULT_GATEWAY_URL, api_key, gateway_url  # noqa: E402

APP = Path(__file__).parents[2] / "console" / "app.py"
LOAD = {
    "num_running": 2,
    "num_waiting": 1,
    "num_reserved": 0,
    "num_held": 0,
    "free_blocks": 75,
    "draining": False,
    "num_prefill_tokens_total": 1000,
    "num_output_tokens_total": 50,
    "waiting_prefill_tokens": 9,
}
WORKER = {
    "worker_id": "prefill-1",
    "role": "prefill",
    "address": "127.0.0.1:7001",
    "device": "cpu",
    "model": "demo",
    "pid": 42,
    "version": "0.1.0",
    "age_s": 0.4,
    "load": LOAD,
    "total_blocks": 100,
}
CLUSTER = {
    "gateway_id": "gw-1",
    "model": "demo",
    "served_model": "SmolLM2-135M",
    "context_tokens": 2048,
    "uptime_s": 12.5,
    "missing": [],
    "workers": [WORKER, WORKER | {"worker_id": "decode-1", "role": "decode", "load": LOAD | {"draining": True}}],
}
ROWS = [
    {
        "request_id": f"r-{ttft_s}",
        "created_at": "2025-01-01T00:00:00Z",
        "status": "ok",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "ttft_s": ttft_s,
        "mean_tbt_s": 0.02,
        "e2e_s": 0.5,
        "prefill_worker": "prefill-1",
        "decode_worker": "decode-1",
        "error": None,
    }
    for ttft_s in (0.1, 0.3, None)
]


class FakeGateway:
    """Answers with what it is told, by path, and remembers what it was sent."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/halfmoon/v1/cluster": (200, CLUSTER),
            "/halfmoon/v1/requests": (200, ROWS),
            "/v1/chat/completions": (200, [{"choices": [{"delta": {"content": t}}]} for t in ("Hel", "lo")]),
        }
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.closes_early = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.asked.append(self.path)
                gateway.keys.append(self.headers["Authorization"])
                status, answer = gateway.answers[self.path.partition("?")[0]]
                self._send(status, json.dumps(answer).encode())

            def do_POST(self) -> None:
                gateway.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, events = gateway.answers[self.path]
                if status != 200:
                    self._send(status, json.dumps(events).encode())
                    return
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                lines += [] if gateway.closes_early else ["data: [DONE]\n\n"]
                self._send(200, "".join(lines).encode())

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


@pytest.fixture
def app(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.argv", ["app.py", "--gateway", gateway.url])
    return testing.AppTest.from_file(str(APP), default_timeout=60)


def open_page(app: Any, page: str) -> Any:
    shown = app.run()
    if page != "Cluster":
        shown = shown.sidebar.radio[0].set_value(page).run()
    assert not shown.exception
    return shown


def test_the_cluster_page_shows_workers_and_block_use(app: Any) -> None:
    shown = open_page(app, "Cluster")
    assert {metric.label: metric.value for metric in shown.metric} == {
        "Model": "SmolLM2-135M",
        "Workers": "2",
        "Running": "4",
        "Waiting": "2",
    }
    table = shown.dataframe[0].value
    assert list(table["worker"]) == ["prefill-1", "decode-1"]
    assert list(table["state"]) == ["serving", "draining"]
    assert list(table["blocks used"]) == [0.25, 0.25]


def test_an_empty_cluster_says_what_is_missing(app: Any, gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/cluster"] = (200, CLUSTER | {"workers": [], "missing": ["prefill", "decode"]})
    shown = open_page(app, "Cluster")
    assert "no prefill and no decode worker" in shown.warning[0].value
    assert not shown.dataframe


def test_the_requests_page_shows_times(app: Any, gateway: FakeGateway) -> None:
    shown = open_page(app, "Requests")
    assert {metric.label: metric.value for metric in shown.metric} == {
        "Requests": "3",
        "Median TTFT": "200.0 ms",
        "Median of mean TBT": "20.0 ms",
    }
    assert list(shown.dataframe[0].value["TTFT (ms)"])[:2] == [100.0, 300.0]
    shown.selectbox[0].set_value(200).run()
    assert gateway.asked[-1] == "/halfmoon/v1/requests?limit=200"


def test_no_requests_yet(app: Any, gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/requests"] = (200, [])
    assert "No request has come yet" in open_page(app, "Requests").info[0].value


def test_chat_streams_a_reply_and_keeps_the_history(app: Any, gateway: FakeGateway) -> None:
    shown = open_page(app, "Chat").chat_input[0].set_value("Hi").run()
    assert [message.markdown[0].value for message in shown.chat_message] == ["Hi", "Hello"]
    shown.chat_input[0].set_value("More").run()
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["Hi", "Hello", "More"]
    assert (gateway.bodies[-1]["model"], gateway.bodies[-1]["stream"]) == ("SmolLM2-135M", True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((429, {"error": {"message": "no capacity now"}}), "the gateway answered 429: no capacity now"),
        ((200, [{"error": {"message": "the worker died"}}]), "the worker died"),
        ((502, "nonsense"), "the gateway answered 502"),
    ],
)
def test_a_failed_reply_is_said_and_not_remembered(app: Any, gateway: FakeGateway, answer: Any, said: str) -> None:
    good = gateway.answers["/v1/chat/completions"]
    gateway.answers["/v1/chat/completions"] = answer
    shown = open_page(app, "Chat").chat_input[0].set_value("Hi").run()
    assert said in shown.error[0].value
    gateway.answers["/v1/chat/completions"] = good
    shown.chat_input[0].set_value("Again").run()
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["Again"]


@pytest.mark.parametrize("page", ["Cluster", "Requests", "Chat"])
def test_an_unreachable_gateway_is_a_clear_message(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["app.py"])
    monkeypatch.setenv("HALFMOON_CONSOLE_GATEWAY_URL", "http://127.0.0.1:1")
    shown = open_page(testing.AppTest.from_file(str(APP), default_timeout=60), page)
    assert "no gateway at http://127.0.0.1:1" in shown.error[0].value


def test_a_wrong_argument_is_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["app.py", "--gatway", "x"])
    shown = testing.AppTest.from_file(str(APP), default_timeout=60).run()
    assert "unknown arguments: --gatway x" in shown.error[0].value


def test_a_reply_that_breaks_off_is_an_error(gateway: FakeGateway) -> None:
    gateway.closes_early = True
    pieces = GatewayApi(gateway.url).chat("m", [], 1, 0)
    assert [next(pieces), next(pieces)] == ["Hel", "lo"]
    with pytest.raises(GatewayError, match="broke off"):
        next(pieces)


@pytest.mark.parametrize("path", ["/halfmoon/v1/cluster", "/halfmoon/v1/requests"])
def test_another_server_is_not_a_gateway(gateway: FakeGateway, path: str) -> None:
    gateway.answers[path] = (200, "hello")
    api = GatewayApi(gateway.url)
    with pytest.raises(GatewayError, match="something that is not"):
        api.cluster() if "cluster" in path else api.requests(1)


def test_the_key_is_sent_where_there_is_one(gateway: FakeGateway) -> None:
    for environment in ({}, {"HALFMOON_CONSOLE_API_KEY": "k"}):
        GatewayApi(gateway.url, api_key(environment)).cluster()
    assert gateway.keys == [None, "Bearer k"]


def test_where_the_gateway_is() -> None:
    assert gateway_url([], {}) == DEFAULT_GATEWAY_URL
    assert gateway_url([], {"HALFMOON_CONSOLE_GATEWAY_URL": "http://a:1/"}) == "http://a:1"
    assert gateway_url(["--gateway", "https://b"], {"HALFMOON_CONSOLE_GATEWAY_URL": "http://a:1"}) == "https://b"
    for wrong in (["--gateway"], ["--gateway", "b:1"], ["x"]):
        with pytest.raises(ValueError, match=r"gateway"):
            gateway_url(wrong, {})


def test_figures_of_nothing() -> None:
    assert median([None]) is None
    assert median([3.0, None, 1.0]) == 2.0
    assert used_share({"total_blocks": 0, "load": LOAD}) is None
    assert used_share({"total_blocks": 10, "load": None}) is None
