"""The planner over a real loopback channel, its model look-up and its life as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest, NotFound, UnknownModel
from halfmoon.ledger.ledger import Ledger, open_ledger
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.rpc.operator_token import OperatorToken
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.service import read_settings
from services.planner import model as model_module
from services.planner.fleet import Fleet
from services.planner.job_process import run_job
from services.planner.job_queue import JobQueue
from services.planner.jobs import Jobs
from services.planner.metrics import PlannerMetrics
from services.planner.model import read_model_config
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


class Planner:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.stub = planner_pb2_grpc.PlannerStub(peer.channel)

    async def capacity(self, model: str, **fields: object) -> planner_pb2.CapacityResponse:
        known = {"dtype": "float16", "memory_bytes": 16 << 20, "num_devices": 1, "context_tokens": 100}
        request = planner_pb2.CapacityRequest(model=model, **{**known, **fields})  # type: ignore[arg-type]
        response = await self.peer.call(self.stub.Capacity, request, deadline_s=30)
        assert isinstance(response, planner_pb2.CapacityResponse)
        return response


@asynccontextmanager
async def planner(fleet: str | None = None) -> AsyncIterator[Planner]:
    async with (
        open_ledger("sqlite://") as ledger,
        running_server("127.0.0.1:0", [_servicer(ledger, fleet).register], PlannerMetrics().rpc, grace_s=0) as server,
        Peer(f"127.0.0.1:{server.port}") as peer,
    ):
        yield Planner(peer)


def _servicer(ledger: Ledger, fleet: str | None) -> PlannerServicer:
    jobs = Jobs(JobQueue(1, 0), 1.0, run_job)
    return PlannerServicer(read_model_config, ledger.plans, jobs, OperatorToken(None, "127.0.0.1"), 1, Fleet(fleet))


async def test_capacity_of_a_directory(model_dir: str) -> None:
    async with planner() as it:
        answer = await it.capacity(model_dir)
        same = await it.capacity(model_dir, block_tokens=64, reserved_share=0.1)
    assert answer.fits
    assert answer.kv_block_bytes == 2 * 2 * 2 * 16 * 2 * 64
    assert answer.num_sequences == answer.num_blocks // 2
    assert answer == same, "zeros mean the defaults"


@pytest.mark.parametrize(
    "fields", [{"dtype": "int4"}, {"num_devices": 3}, {"context_tokens": 1025}, {"reserved_share": 1.5}]
)
async def test_bad_questions_name_the_parameter(model_dir: str, fields: dict[str, object]) -> None:
    async with planner() as it:
        with pytest.raises(InvalidRequest) as caught:
            await it.capacity(model_dir, **fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fleet", "error"),
    [(None, Incompatible), ("unix:/nowhere/fleet", NotFound)],
    ids=["no workers to change", "no plan"],
)
async def test_what_cannot_be_applied_is_known_beforehand_and_refused(
    fleet: str | None, error: type[HalfmoonError]
) -> None:
    request = planner_pb2.ApplyRequest(plan_id=7)
    async with planner(fleet) as it:
        told = await it.peer.call(it.stub.Catalogue, planner_pb2.CatalogueRequest(), deadline_s=30)
        assert told.can_apply == (fleet is not None)
        with pytest.raises(error):
            await it.peer.call(it.stub.PreviewApply, request, deadline_s=30)
        with pytest.raises(error):
            async with it.peer.stream(it.stub.Apply, request, deadline_s=30) as updates:
                await anext(updates)


async def test_a_question_without_a_model_is_refused() -> None:
    async with planner() as it:
        with pytest.raises(InvalidRequest) as caught:
            await it.capacity("")
    assert caught.value.param == "model"


async def test_unsupported_architectures_say_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"]}))
    async with planner() as it:
        with pytest.raises(Incompatible, match="Mamba"):
            await it.capacity(str(tmp_path))


def test_of_a_hub_model_only_the_configuration_is_fetched(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(model: str, file: str) -> str:
        asked.append((model, file))
        return f"{model_dir}/{file}"

    monkeypatch.setattr(model_module, "hf_hub_download", download)
    assert read_model_config("someone/some-model").hidden_size == 64
    assert asked == [("someone/some-model", "config.json")]


def test_a_hub_that_does_not_answer_is_an_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, file: str) -> str:
        raise OSError("offline")

    monkeypatch.setattr(model_module, "hf_hub_download", download)
    with pytest.raises(UnknownModel, match="some-model"):
        read_model_config("someone/some-model")


def test_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HALFMOON_PLANNER_LISTEN", "127.0.0.1:7")
    assert read_settings(PlannerSettings, []).listen == "127.0.0.1:7"
    assert read_settings(PlannerSettings, ["--listen", "127.0.0.1:8"]).listen == "127.0.0.1:8"
    with pytest.raises(SystemExit):
        read_settings(PlannerSettings, ["--lissten", "x"])
    assert "--lissten" in capsys.readouterr().err
    with pytest.raises(InvalidRequest):
        read_settings(PlannerSettings, ["--metrics-port", "70000"])
    monkeypatch.setenv("HALFMOON_PLANNER_LISSTEN", "x")
    with pytest.raises(InvalidRequest, match="LISSTEN"):
        read_settings(PlannerSettings, [])


def test_the_program_says_ready_and_stops_cleanly(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "services.planner", "--metrics-port", "0", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            events = [json.loads(process.stderr.readline())]
            while events[-1]["event"] != "service.ready":
                events.append(json.loads(process.stderr.readline()))
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert events[0]["event"] == "service.settings"
    assert events[-1]["address"].startswith("127.0.0.1:")
    assert (process.returncode, rest) == (0, "")
