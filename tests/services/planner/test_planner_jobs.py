"""Plan jobs over a real loopback channel: progress, turns, deadlines, cancellation, and what the ledger stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from glob import glob
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from halfmoon.errors import DeadlineExceeded, HalfmoonError, InvalidRequest, NoCapacity, Unauthenticated, Unavailable
from halfmoon.ledger.ledger import open_ledger
from halfmoon.ledger.plans import NewPlan, StoredPlan
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.operator_token import OperatorToken
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.status import error_from
from services.planner.fleet import Fleet
from services.planner.job import JobProgress, JobResult, PlanJob
from services.planner.job_process import run_job
from services.planner.job_queue import JobQueue
from services.planner.jobs import Jobs, RunJob
from services.planner.kept_plans import KeptPlans, PlansOfLedger
from services.planner.metrics import PlannerMetrics
from services.planner.servicer import MAX_REQUEST_BYTES, PlannerServicer
from services.planner.wire import plan_request

ASKED = planner_pb2.PlanRequest(
    model="opt-13b", gpu="a100-80g", workload="in=512,out=64", ttft_s=0.2, tpot_s=0.1, gpus_per_node=1,
    num_requests=30, latency="distserve:opt-13b", with_curves=True,
)  # fmt: skip
ROWS = [{"start_time": 0.5 * number, "prompt_len": 512, "output_len": 64} for number in range(30)]


class Bench:
    """Stands in for processes: a job says what is put to it, until its result."""

    def __init__(self) -> None:
        self.jobs: list[PlanJob] = []
        self.files: list[Mapping[str, bytes]] = []
        self.num_inside = 0
        self.left = asyncio.Event()
        self.said: asyncio.Queue[JobProgress | JobResult] = asyncio.Queue()

    async def run(self, job: PlanJob, files: Mapping[str, bytes]) -> AsyncGenerator[JobProgress | JobResult, None]:
        self.jobs.append(job)
        self.files.append(files)
        self.num_inside += 1
        try:
            while True:
                yield await self.said.get()
        finally:
            self.num_inside -= 1
            self.left.set()

    def finish(self) -> None:
        self.said.put_nowait(JobResult({"summary": {"gpu": "x"}, "plan_yaml": "model: m"}))


class AwayPlans:
    """A ledger that does not answer."""

    async def add(self, plan: NewPlan) -> StoredPlan:
        raise Unavailable("the ledger is away")

    async def newest(self, limit: int) -> list[StoredPlan]:
        raise Unavailable("the ledger is away")

    async def of_id(self, plan_id: int) -> StoredPlan:
        raise Unavailable("the ledger is away")


@asynccontextmanager
async def planner(
    run: RunJob,
    plans: KeptPlans | None = None,
    token: OperatorToken | None = None,
    credential: Credential | None = None,
    deadline_s: float = 120,
    most_waiting: int = 1,
) -> AsyncIterator[planner_pb2_grpc.PlannerStub]:
    jobs = Jobs(JobQueue(1, most_waiting), deadline_s, run)
    servicer = PlannerServicer(plans or AwayPlans(), jobs, 1, Fleet(None))
    async with (
        running_server(
            "127.0.0.1:0",
            [servicer.register],
            PlannerMetrics().rpc,
            grace_s=0,
            max_message_bytes=MAX_REQUEST_BYTES,
            access=CallAccess(credential, token),
        ) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
    ):
        yield planner_pb2_grpc.PlannerStub(peer.channel)


async def all_of(call: Any) -> list[Any]:
    """What a stream says. Raises errors of our tree."""
    try:
        return [update async for update in call]
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from error


async def test_a_plan_is_found_kept_and_listed(tmp_path: Path) -> None:
    """The search itself, in its process."""
    async with (
        open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger,
        planner(run_job, PlansOfLedger(ledger)) as stub,
    ):
        updates = await all_of(stub.Plan(ASKED, timeout=120))
        listed = await stub.ListPlans(planner_pb2.ListPlansRequest(limit=5), timeout=30)
    assert {one.WhichOneof("update") for one in updates[:-1]} == {"progress"}
    assert {one.progress.what for one in updates[:-1]} >= {"workers alone", "curves"}
    plan = updates[-1].plan
    assert list(listed.plans) == [plan]
    summary = json.loads(plan.summary_json)
    assert summary["layouts"][0]["layout"] == summary["curves"][0]["layout"]
    assert json.loads(plan.request_json)["latency"] == "distserve:opt-13b"
    assert plan.id == 1
    assert plan.plan_yaml.startswith("model: opt-13b\n")


def _with_trace(content: bytes) -> planner_pb2.PlanRequest:
    request = planner_pb2.PlanRequest()
    request.CopyFrom(ASKED)
    request.workload = "w.json"
    request.files.add(name="w.json", content=content)
    return request


async def test_a_map_is_drawn_by_its_process_and_not_kept() -> None:
    asked = planner_pb2.PlanRequest(
        model="llama-3-8b", gpu="h100", workload="in=512,out=16", gpus_per_node=2, num_requests=20, ttft_s=0.2,
        is_map=True,
    )  # fmt: skip
    async with planner(run_job) as stub:
        updates = await all_of(stub.Plan(asked, timeout=120))
    assert {one.progress.what for one in updates[:-1]} == {"layouts", "other requests and times"}
    summary, chart = (json.loads(text) for text in (updates[-1].map.summary_json, updates[-1].map.chart_json))
    assert summary["ttfts_s"] == [0.05, 0.079, 0.13, 0.2, 0.32, 0.5, 0.8]
    assert len(chart["data"]["values"]) == len(summary["cells"])


async def test_a_plan_reads_the_files_that_came_with_it() -> None:
    request = _with_trace(json.dumps(ROWS).encode())
    request.with_curves = False
    async with planner(run_job) as stub:
        updates = await all_of(stub.Plan(request, timeout=120))
    assert updates[-2].progress.done > 0
    assert json.loads(updates[-1].plan.request_json)["workload"] == "w.json"
    assert json.loads(updates[-1].plan.summary_json)["layouts"]


async def test_a_trace_may_have_megabytes() -> None:
    bench, trace = Bench(), b"[" + b" " * (5 << 20) + b"]"
    async with planner(bench.run) as stub:
        bench.finish()
        await all_of(stub.Plan(_with_trace(trace), timeout=60))
    assert bench.files[0]["w.json"] == trace


async def test_leaving_the_iteration_ends_the_process_and_what_it_started() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with aclosing(run_job(PlanJob(plan_request(ASKED), 2, True), {})) as events:
        await anext(events)
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) >= 3  # itself, and two of its own
        semaphores = {name for process in started for name in _semaphores_of(process)}
    gone, alive = psutil.wait_procs(list(started), timeout=60)
    assert not alive
    assert len(gone) == len(started)
    assert semaphores
    assert not semaphores & set(await asyncio.to_thread(glob, "/dev/shm/sem.*"))


def _semaphores_of(process: psutil.Process) -> set[str]:
    """The named semaphores that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/sem." in line}


async def test_who_leaves_the_stream_ends_the_job() -> None:
    bench = Bench()
    async with planner(bench.run) as stub:
        call = stub.Plan(ASKED, timeout=60)
        bench.said.put_nowait(JobProgress("workers alone", 1, 2))
        assert (await call.read()).progress.done == 1
        assert bench.num_inside == 1
        call.cancel()
        await asyncio.wait_for(bench.left.wait(), 60)
        assert bench.num_inside == 0


async def test_one_runs_the_next_waits_and_is_told_and_a_third_is_refused() -> None:
    bench = Bench()
    async with planner(bench.run) as stub:
        first = stub.Plan(ASKED, timeout=60)
        bench.said.put_nowait(JobProgress("x", 0, 1))
        await first.read()
        second = stub.Plan(ASKED, timeout=60)
        assert (await second.read()).waiting.ahead == 1
        with pytest.raises(NoCapacity) as caught:
            await all_of(stub.Plan(ASKED, timeout=60))
        assert caught.value.retry_after_ms is not None
        bench.finish()
        assert (await first.read()).WhichOneof("update") == "plan"
        bench.finish()
        assert (await second.read()).WhichOneof("update") == "plan"
    assert len(bench.jobs) == 2


async def test_a_plan_that_cannot_be_kept_is_told_all_the_same() -> None:
    bench = Bench()
    bench.finish()
    async with planner(bench.run) as stub:
        plan = (await all_of(stub.Plan(ASKED, timeout=60)))[-1].plan
    assert (plan.id, plan.plan_yaml) == (0, "model: m")


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_what_takes_too_long_ends(is_waiting: bool) -> None:
    bench = Bench()
    turns = JobQueue(1, 1)
    jobs = Jobs(turns, 0.01, bench.run)

    async def ask() -> None:
        async with aclosing(jobs.updates(PlanJob(plan_request(ASKED), 1, False), {})) as updates:
            async for _ in updates:
                pass

    if is_waiting:
        with turns.ticket(), pytest.raises(DeadlineExceeded, match="fewer requests"):
            await ask()
        return
    with pytest.raises(DeadlineExceeded, match="fewer requests"):
        await ask()
    assert bench.num_inside == 0


def test_a_plan_is_thorough_where_that_is_asked_for() -> None:
    thorough = planner_pb2.PlanRequest(is_thorough=True)
    thorough.MergeFrom(ASKED)
    assert plan_request(thorough).is_thorough
    assert not plan_request(ASKED).is_thorough


@pytest.mark.parametrize(
    ("changed", "param", "says"),
    [
        ({"model": ""}, "model", "a plan needs model"),
        ({"tpot_s": 0}, "tpot_s", "a plan needs tpot_s"),
        ({"criterion": "none"}, "criterion", "'joint' or 'marginal'"),
        ({"num_requests": 1}, "num_requests", "2..20000"),
        ({"num_requests": 1 << 30}, "num_requests", "2..20000"),
        ({"workload": "/etc/passwd"}, "workload", "send the file along"),
        ({"latency": "roofline:../x.json"}, "latency", "send the file along"),
        ({"model": "~/model"}, "model", "send the file along"),
        ({"model": ".."}, "model", "send the file along"),
        ({"model": "some/model"}, "model", "send the file along"),
        ({"latency": "roofline:.."}, "latency", "send the file along"),
        ({"files": [planner_pb2.File(name="../w.json")]}, "files", "a file's name has letters"),
        ({"files": [planner_pb2.File(name="c.yaml")]}, "files", "a file's name has letters"),
        ({"files": [planner_pb2.File(name="c.json", content=b"[" * (8 << 20 | 1))]}, "files", "as .jsonl or .csv"),
        ({"files": [planner_pb2.File(name="numpy.py")]}, "files", "a file's name has letters"),
    ],
)
async def test_a_bad_plan_request_is_refused_before_its_turn(changed: dict[str, Any], param: str, says: str) -> None:
    bench, request = Bench(), planner_pb2.PlanRequest()
    request.CopyFrom(ASKED)
    for name in changed:
        request.ClearField(name)  # type: ignore[arg-type]
    request.MergeFrom(planner_pb2.PlanRequest(**changed))
    async with planner(bench.run) as stub:
        with pytest.raises(InvalidRequest, match=says) as caught:
            await all_of(stub.Plan(request, timeout=60))
    assert caught.value.param == param
    assert not bench.jobs


@pytest.mark.parametrize(
    ("name", "options"),
    [("m.json", {"model": "m.json", "latency": "roofline:m.json"}), ("w.jsonl", {"workload": "w.jsonl"})],
)
async def test_a_file_that_is_nested_too_deeply_is_the_callers_mistake(name: str, options: dict[str, str]) -> None:
    request = planner_pb2.PlanRequest()
    request.CopyFrom(ASKED)
    request.MergeFrom(planner_pb2.PlanRequest(**options))  # type: ignore[arg-type]
    request.files.append(planner_pb2.File(name=name, content=b"[" * 100_000 + b"\n"))
    async with planner(run_job) as stub:
        with pytest.raises(InvalidRequest):
            await all_of(stub.Plan(request, timeout=120))


async def test_what_the_job_refuses_is_told() -> None:
    request = planner_pb2.PlanRequest()
    request.CopyFrom(ASKED)
    request.gpu = "v100"
    async with planner(run_job) as stub:
        with pytest.raises(InvalidRequest, match="known are a100-80g") as caught:
            await all_of(stub.Plan(request, timeout=120))
    assert caught.value.param == "gpu"


@pytest.mark.parametrize(
    ("token", "sent", "is_let_in"),
    [
        (OperatorToken("secret"), "Bearer secret", True),
        (OperatorToken("secret"), "Bearer wrong", False),
        (OperatorToken("secret"), "", False),
        (OperatorToken(None), "", True),
    ],
)
async def test_where_there_is_an_operator_token_it_is_needed(token: OperatorToken, sent: str, is_let_in: bool) -> None:
    metadata = (("authorization", sent),)
    async with planner(Bench().run, token=token) as stub:
        calls = (
            stub.Catalogue(planner_pb2.CatalogueRequest(), timeout=30, metadata=metadata),
            stub.ListPlans(planner_pb2.ListPlansRequest(), timeout=30, metadata=metadata),
            stub.Plan(planner_pb2.PlanRequest(), timeout=30, metadata=metadata).read(),
            stub.PreviewApply(planner_pb2.ApplyRequest(), timeout=30, metadata=metadata),
            stub.Apply(planner_pb2.ApplyRequest(), timeout=30, metadata=metadata).read(),
        )
        refused = [isinstance(one, Unauthenticated) for one in await asyncio.gather(*map(_error_of, calls))]
    assert refused == [not is_let_in] * len(calls)


async def _error_of(call: Any) -> HalfmoonError | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    return None
