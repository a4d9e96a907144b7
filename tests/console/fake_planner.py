"""A planner that answers what it is told, over gRPC, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from halfmoon.pb import planner_pb2, planner_pb2_grpc

_TIMES = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": 0.3}
_JUDGED = {
    "rate_per_s": 10.0, "attainment_joint": 0.95, "attainment_ttft": 0.96, "attainment_tpot": 0.99, "ttft_s": _TIMES,
    "tpot_s": _TIMES,
}  # fmt: skip


def rated(layout: str, num_gpus: int, goodput_per_s: float) -> dict[str, Any]:
    """A layout of a summary."""
    return {
        "layout": layout, "workers": [], "num_gpus": num_gpus, "price_per_hour": 3.8 * num_gpus,
        "goodput_per_s": goodput_per_s, "goodput_per_s_per_gpu": goodput_per_s / num_gpus,
        "goodput_per_dollar": 3600 * goodput_per_s / (3.8 * num_gpus),
    }  # fmt: skip


APART, BOTH = rated("1 prefill TP1 + 1 decode TP1", 2, 12.0), rated("2 both TP1", 2, 10.0)
SUMMARY: dict[str, Any] = {
    "gpu": "h200", "objective": "gpus", "criterion": "joint", "attainment_asked": 0.9, "rate_asked_per_s": 10.0,
    "targets": {"ttft_s": 0.25, "tpot_s": 0.05, "tbt_s": None},
    "layouts": [APART | _JUDGED, BOTH | _JUDGED], "disaggregated": APART, "colocated": BOTH, "over_colocated": 1.2,
    "sensitivity": {"traffic +20 %": _JUDGED, "outputs +50 %": _JUDGED | {"attainment_joint": 0.5}},
    "curves": [
        {"layout": APART["layout"], "num_gpus": 2, "rate_per_s": [5.0, 15.0], "attainment": [1.0, 0.6]},
        {"layout": BOTH["layout"], "num_gpus": 2, "rate_per_s": [5.0, 15.0], "attainment": [1.0, 0.4]},
    ],
    "latency": [{"source": "measured", "error_prefill": 0.02, "error_step": 0.03}],
    "notes": ["prices are of 2025"], "num_simulated": 2, "num_ruled_out": 0,
}  # fmt: skip


def plan(number: int) -> planner_pb2.StoredPlan:
    """One of the ledger's."""
    return planner_pb2.StoredPlan(
        id=number, created_at="2026-01-01T00:00:00+00:00", model="llama-3-8b",
        request_json='{"workload": "chat"}', summary_json=json.dumps(SUMMARY), plan_yaml="model: llama-3-8b\n",
    )  # fmt: skip


_ROW = {"ttft": 200.0, "tpot": 20.0, "winner": "disaggregated", "doublings": 0.3, "label": "+23%"}
TARGET_MAP = planner_pb2.TargetMap(
    summary_json=json.dumps(
        {"model": "llama-3-8b", "gpu": "2 x h200", "workload": "chat", "sentence": "Separate workers win all."}
    ),
    chart_json=json.dumps(
        {
            "usermeta": {"how_to_read": "orange means separate"},
            "data": {"values": [_ROW]},
            "mark": "rect",
            "padding": 12,
            "encoding": {},
        }
    ),
)
CHANGE = planner_pb2.WorkerChange(
    now=[planner_pb2.WorkerGroup(role="prefill", count=1), planner_pb2.WorkerGroup(role="decode", count=1)],
    then=[planner_pb2.WorkerGroup(role="both", count=2, options="--max-running 32")],
    num_started=2, num_stopped=2,
)  # fmt: skip


class FakePlanner(planner_pb2_grpc.PlannerServicer):
    """Owns its plans. A search says `updates`, then waits to be let `go`, then ends with `found` or `refuses`."""

    def __init__(self) -> None:
        self.plans = [plan(1)]
        self.asked: list[planner_pb2.PlanRequest] = []
        self.tokens: list[Any] = []
        self.credentials: list[Any] = []
        self.updates = [planner_pb2.PlanUpdate(progress=planner_pb2.Progress(what="workers alone", done=1, total=4))]
        self.found: planner_pb2.StoredPlan | None = plan(2)
        self.is_ledger_away = False
        self.num_listed = 0
        self.go = threading.Event()
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.address = ""
        self.can_apply = False
        self.change = CHANGE
        self.refuses_to_apply: str | None = None  # said after the first update
        self.is_lost = False  # after the first update
        self.applied: list[tuple[int, bool]] = []

    def Catalogue(self, request: planner_pb2.CatalogueRequest, context: Any) -> planner_pb2.CatalogueResponse:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        self.credentials.append(dict(context.invocation_metadata()).get("halfmoon-credential"))
        models = ("opt-13b", "llama-3-8b")
        return planner_pb2.CatalogueResponse(
            gpus=["h200", "l40s"], models=models, workloads=["chat", "code"], can_apply=self.can_apply
        )

    def PreviewApply(self, request: planner_pb2.ApplyRequest, context: Any) -> planner_pb2.WorkerChange:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        return self.change

    def Apply(self, request: planner_pb2.ApplyRequest, context: Any) -> Iterator[planner_pb2.ApplyUpdate]:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        self.applied.append((request.plan_id, request.stop_first))
        yield planner_pb2.ApplyUpdate(progress=planner_pb2.Progress(what="starting", done=1, total=2))
        self.go.wait()
        if self.is_lost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # as gRPC says it
        if self.refuses_to_apply is not None:
            context.set_trailing_metadata((("halfmoon-error", "ServiceFailed"),))
            context.abort(grpc.StatusCode.INTERNAL, self.refuses_to_apply)
        yield planner_pb2.ApplyUpdate(applied=self.change)

    def ListPlans(self, request: planner_pb2.ListPlansRequest, context: Any) -> planner_pb2.ListPlansResponse:
        self.num_listed += 1
        if self.is_ledger_away:
            context.set_trailing_metadata((("halfmoon-error", "Unavailable"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "the ledger does not answer")
        return planner_pb2.ListPlansResponse(plans=self.plans)

    def Plan(self, request: planner_pb2.PlanRequest, context: Any) -> Iterator[planner_pb2.PlanUpdate]:
        self.asked.append(request)
        self.begun.set()
        context.add_callback(self.ended.set)
        context.add_callback(self.go.set)
        yield from self.updates
        self.go.wait()
        if self.found is None:
            context.set_trailing_metadata((("halfmoon-error", "InvalidRequest"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "TTFT 0.25 s cannot be met")
        elif request.is_map:
            yield planner_pb2.PlanUpdate(map=TARGET_MAP)
        else:
            self.plans.insert(0, self.found)
            yield planner_pb2.PlanUpdate(plan=self.found)


@contextmanager
def running_fake_planner() -> Iterator[FakePlanner]:
    """On a free port."""
    fake, server = FakePlanner(), grpc.server(ThreadPoolExecutor(4))
    planner_pb2_grpc.add_PlannerServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        fake.go.set()
        server.stop(grace=None).wait()
