"""A gateway that answers what it is told, by path, and remembers what it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from services.gateway.telemetry.time_series import QUANTILES

LOAD = {
    "num_running": 2, "num_waiting": 1, "num_reserved": 0, "num_held": 0, "free_blocks": 75, "draining": False,
    "num_prefill_tokens_total": 1000, "num_output_tokens_total": 50, "waiting_prefill_tokens": 9,
}  # fmt: skip
WORKER = {
    "worker_id": "prefill-1", "role": "prefill", "address": "h:1", "device": "cpu", "model": "demo", "pid": 42,
    "version": "0.1.0", "age_s": 0.4, "load": LOAD, "total_blocks": 100, "cached_blocks": 7, "measured_step_s": 0.012,
    "predicted_step_s": 0.011, "links": [{"address": "h:2", "bytes_per_s": 1e9, "latency_s": 0.001}], "kv_store": "h:9",
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "gateway_id": "gw-1", "model": "demo", "served_model": "SmolLM2-135M", "context_tokens": 2048, "uptime_s": 12.5,
    "missing": [], "heartbeat_interval_s": 1.0, "silent_after_s": 1.8, "departed": [],
    "workers": [
        WORKER,
        WORKER | {"worker_id": "decode-1", "role": "decode", "address": "h:2", "load": LOAD | {"draining": True}},
    ],
}  # fmt: skip
_LINE: dict[str, list[float | None]] = {name: [share / 3, None] for name, share in QUANTILES.items()}
_COUNTS = {"ended": 10, "good": 8, "refused": 1, "failed": 1}
SERIES: dict[str, Any] = {
    "bucket_s": 5.0, "age_s": [7.5, 2.5],
    "rates": {name: [5.0, 10.0] for name in ("prompt_tokens", "cached_tokens", "prefill_tokens", "output_tokens")},
    "requests": {"ended": [1.0, 2.0], "good": [1.0, 1.0], "refused": [0.0, 0.5], "failed": [0.0, 0.0]},
    "ttft_s": _LINE, "tbt_s": _LINE, "refusals": {"ttft": [0.0, 0.5]}, "num_running": [1, 2], "num_waiting": [0, 0],
    "used_share": [0.1, 0.25],
    "together": {
        "seconds": 10.0, "classes": {"gold": _COUNTS, "none": _COUNTS}, "prompt_tokens": 200, "cached_tokens": 50,
        "prefill_tokens": 150, "output_tokens": 80, "ttft_s": {"p50": 0.1, "p90": 0.2, "p99": 0.3},
        "tbt_s": {"p50": 0.01, "p90": 0.02, "p99": 0.03},
    },
}  # fmt: skip
_CANDIDATE = {
    "worker_id": "prefill-1", "queue_s": 0.01, "restore_s": 0.0, "compute_s": 0.05, "ttft_s": 0.06, "cached_tokens": 64,
    "fetched_tokens": 0,
}  # fmt: skip
PLACEMENT: dict[str, Any] = {
    "request_id": "r-1", "age_s": 3.0, "waited_s": 0.002, "qos_class": "gold", "prompt_tokens": 100,
    "prefill_worker": "prefill-1", "decode_worker": "decode-1", "refusal": None, "disaggregation": "not_faster",
    "predicted": {"ttft_s": 0.06, "tbt_s": 0.01}, "moves": [],
    "measured": {
        "status": "ok", "queue_s": 0.01, "prefill_s": 0.05, "ttft_s": 0.08, "tbt_s": 0.012, "e2e_s": 0.5,
        "cached_tokens": 64, "loaded_tokens": 24, "output_tokens": 20, "drafts": 12, "right_drafts": 9,
    },
    "candidates": [_CANDIDATE, _CANDIDATE | {"worker_id": "prefill-2", "compute_s": 0.1, "ttft_s": 0.11}],
}  # fmt: skip
REFUSED = PLACEMENT | {
    "request_id": "r-2", "refusal": "ttft", "prefill_worker": None, "decode_worker": None, "measured": None,
    "disaggregation": None,
}  # fmt: skip
_SPAN: dict[str, Any] = {
    "service": "gateway",
    "name": "admission",
    "start_s": 0.0,
    "end_s": 0.002,
    "predicted_s": None,
    "num_tokens": None,
    "num_bytes": None,
}
REQUEST: dict[str, Any] = {
    "request": {"request_id": "r-1"}, "decision": PLACEMENT,
    "timeline": [_SPAN, _SPAN | {"service": "prefill-1", "name": "prefill", "start_s": 0.002, "end_s": 0.07}],
}  # fmt: skip
_TIER = {
    "num_blocks": 10, "used_bytes": 1000, "budget_bytes": 4000, "num_waiting": 0, "num_hits_total": 30,
    "num_evicted_total": 1, "num_corrupted_total": 0, "num_failed_total": 0, "num_written_total": 0,
    "num_skipped_total": 0,
}  # fmt: skip
CACHE: dict[str, Any] = {
    "block_bytes": 200,
    "workers": [
        {"worker_id": "prefill-1", "role": "prefill", "cached_blocks": 7, "total_blocks": 100, "block_tokens": 64}
    ],
    "decisions": [
        {"decision": "prefix", "reason": "worker", "count": 3}, {"decision": "prefix", "reason": "local", "count": 7},
        {"decision": "direct_restore", "reason": "kept_loaded", "count": 2},
        {"decision": "copy", "reason": "cold", "count": 0}, {"decision": "unknown here", "reason": "x", "count": 1},
    ],
    "prefixes": [{"key": "ab" * 8, "tokens": 128, "uses": 5, "replicas": 2, "age_s": 4.0}],
}  # fmt: skip
STORES: list[dict[str, Any]] = [{
    "state": "there", "address": "h:9", "num_stored_total": 5, "num_misses_total": 10, "num_expired_total": 0,
    "tiers": [_TIER | {"tier": "dram"}, _TIER | {"tier": "disk"}],
}]  # fmt: skip
GOLD: dict[str, Any] = {
    "name": "gold", "version": 2, "priority": -1, "reserved": 0.25, "ttft_s": 0.5, "tbt_s": None, "attainment": 0.9,
    "rules": [{"kind": "header", "header": "X-Tier", "value": "gold"}], "degradation": ["cap_max_tokens"],
    "capped_tokens": 64,
}  # fmt: skip
_BODY = {name: value for name, value in GOLD.items() if name not in ("name", "version")}
EDITS: list[dict[str, Any]] = [
    {"revision": 2, "edited_at": "2026-01-01T00:00:01+00:00", "name": "gold", "version": 2,
     "definition": _BODY, "before": _BODY | {"ttft_s": 1.0}},
    {"revision": 1, "edited_at": "2026-01-01T00:00:00+00:00", "name": "gold", "version": 1,
     "definition": _BODY | {"ttft_s": 1.0}, "before": None},
]  # fmt: skip
ADMISSION: dict[str, Any] = {
    "mode": "load", "own": "predicted", "set": "load", "version": 2,
    "edits": [
        {"version": 2, "edited_at": "2026-01-01T00:00:01+00:00", "mode": "load"},
        {"version": 1, "edited_at": "2026-01-01T00:00:00+00:00", "mode": None},
    ],
}  # fmt: skip
DECISION: dict[str, Any] = {
    "decided_at": "2026-01-01T00:00:00+00:00", "mode": "act", "action": "change_role",
    "reason": "decode needs more workers", "worker_id": "prefill-1", "before": "prefill", "after": "decode",
    "split": "3:1:0", "target": "2:2:0",
    "num_needed": 0, "prefill": 0.4, "decode": 1.25, "predicted_prefill": 0.6, "predicted_decode": 0.7,
    "attainment": 0.5, "outcome": "done", "measured_at": "2026-01-01T00:00:20+00:00", "measured_prefill": 0.65,
    "measured_decode": 0.6, "measured_attainment": 0.95,
}  # fmt: skip
AUTOPILOT: dict[str, Any] = {
    "mode": "observe", "set": None, "version": 0, "edits": [], "status_at": "2126-01-01T00:00:00+00:00",
    "status": {
        "own_mode": "observe", "mode": "observe", "action": "hold", "reason": "no phase needs more workers",
        "outcome": "", "worker_id": "", "role": None, "split": [3, 1, 0], "target": [2, 2, 0], "num_needed": 0,
        "pressure": {"prefill": 0.4, "decode": None}, "predicted": {"prefill": 0.4, "decode": None},
        "attainment": 0.5, "rate_per_s": 3.0,
        "outlook": {
            "rate_per_s": 4.0, "method": "arima", "error": 0.07, "target": [1, 3, 0], "attainment": 0.9,
            "is_followed": True,
        },
    },
    "decisions": [DECISION],
}  # fmt: skip
PREVIEW = {
    "num_requests": 200, "num_refused": 2, "num_would_be_refused": 10, "num_served": 190, "num_meeting": 188,
    "num_newly_admitted": 0,
    "num_undecided": 0,
}  # fmt: skip
_USAGE = {"num_requests": 12, "num_refused": 2, "prompt_tokens": 900, "cached_tokens": 300, "output_tokens": 80}
_KEY = {
    "key_id": "36047ea5510dfcd1", "label": "cron", "created_at": "2026-01-01T00:00:00+00:00", "expires_at": None,
    "revoked_at": None, "is_declared": False,
}  # fmt: skip
TENANT: dict[str, Any] = {
    "name": "acme", "version": 2, "is_declared": False, "requests_per_minute": 60.0, "tokens_per_minute": None,
    "kv_bytes": 1 << 30, "classes": ["gold", "default"], "default_class": None, "weight": 2.0, "cache_pool": None,
    "keys": [_KEY, _KEY | {"key_id": "00ff", "revoked_at": "2026-01-02T00:00:00+00:00"}], "usage": _USAGE,
    "stored_kv_bytes": 1 << 20,
}  # fmt: skip


class FakeGateway:
    """Owns the answers by path, and what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/halfmoon/v1/cluster": (200, CLUSTER),
            "/halfmoon/v1/series": (200, SERIES),
            "/halfmoon/v1/placements": (200, [PLACEMENT, REFUSED]),
            "/halfmoon/v1/requests/r-1": (200, REQUEST),
            "/halfmoon/v1/cache": (200, CACHE),
            "/halfmoon/v1/stores": (200, STORES),
            "/halfmoon/v1/classes": (200, {"classes": [GOLD]}),
            "/halfmoon/v1/classes/gold": (200, GOLD | {"version": 3}),
            "/halfmoon/v1/tenants": (200, {"tenants": [TENANT], "is_key_needed": True}),
            "/halfmoon/v1/tenants/acme": (200, TENANT),
            "/halfmoon/v1/tenants/acme/keys": (201, _KEY | {"key": "hm-new"}),
            "/halfmoon/v1/tenants/acme/keys/36047ea5510dfcd1": (204, None),
            "/halfmoon/v1/admission": (200, ADMISSION),
            "/halfmoon/v1/autopilot": (200, AUTOPILOT),
            "/halfmoon/v1/class_edits": (200, EDITS),
            "/halfmoon/v1/class_previews/gold": (200, PREVIEW),
            "/v1/chat/completions": (200, [{"choices": [{"delta": {"content": text}}]} for text in ("Hel", "lo")]),
        }
        self.asked: list[tuple[str, str]] = []
        self.keys: dict[str, str | None] = {}
        self.bodies: list[dict[str, Any]] = []
        self.closes_early = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def edits(self) -> list[tuple[str, str]]:
        """What was asked for but looks: method and path."""
        return [(method, path) for method, path in self.asked if method != "GET"]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.asked.append((self.command, self.path))
                path = self.path.partition("?")[0]
                gateway.keys[path] = self.headers["Authorization"]
                status, answer = gateway.answers.get(path, (404, {"error": {"message": f"no {path}"}}))
                self._send(status, json.dumps(answer).encode())

            do_DELETE = do_GET

            def do_PUT(self) -> None:
                gateway.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.do_GET()

            def do_POST(self) -> None:
                if self.path != "/v1/chat/completions":
                    self.do_PUT()
                    return
                gateway.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                gateway.keys[self.path] = self.headers["Authorization"]
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


@contextmanager
def running_fake_gateway() -> Iterator[FakeGateway]:
    """A fake gateway on a free port."""
    fake = FakeGateway()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        thread.join()
        fake.server.server_close()
