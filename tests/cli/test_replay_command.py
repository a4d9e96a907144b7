"""`halfmoon replay` from the command line, on a fake clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.replay.outcome import ReplayTargets, summarized
from halfmoon.replay.virtual import cluster_spec, simulated
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, PROFILES
from halfmoon.sim.workloads.traces import read_workload

PROFILE = PROFILES[DEFAULT_PROFILE]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty conversations of three turns, each of which repeats the last one and a block that all share."""
    rows = [
        {
            "timestamp": 1000 * (number // 4),
            "input_length": 512 * (turn + 2),
            "output_length": 20 + number % 50,
            "hash_ids": [0, *(100 * (number % 40 + 1) + block for block in range(turn + 1))],
        }
        for number, turn in ((number, number // 40) for number in range(120))
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_modes_side_by_side(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    modes = ("--placement", "kvcache-centric,random", "--admission", "off,predicted")
    code, printed = run(str(trace), "--virtual", *modes, "--prefill", "2", "--decode", "1", "--json", str(file))
    assert code == 0, printed
    assert "TTFT mean" in printed
    rows = json.loads(file.read_text())
    assert [(row["placement"], row["admission"]) for row in rows] == [
        ("kvcache-centric", "off"),
        ("kvcache-centric", "predicted"),
        ("random", "off"),
        ("random", "predicted"),
    ]
    for row in rows:
        ends = [row[f"num_{end}"] for end in ("in_time", "late", "refused", "failed")]
        assert sum(ends) == row["num_requests"] == 120
    assert rows[0]["cached_share"] > rows[2]["cached_share"]


def test_a_tight_target_makes_requests_late_or_refused(trace: Path) -> None:
    workload, targets = read_workload(trace), ReplayTargets(ttft_s=0.05)
    ends: dict[AdmissionMode, str] = {"off": "num_late", "predicted": "num_refused"}
    for admission, end in ends.items():
        outcomes = simulated(workload, PROFILE, (1, 1), ("random", admission), targets, lambda done, num: None)
        assert getattr(summarized(outcomes, targets, workload.duration_s), end) > 60


def test_the_virtual_cluster_is_that_of_the_profile() -> None:
    spec = cluster_spec(PROFILE, (3, 2), ("random", "load"), ReplayTargets(ttft_s=2.0))
    assert [(group.role, group.count) for group in spec.groups] == [("prefill", 3), ("decode", 2)]
    assert spec.groups[0].latency.prefill_s(1000, 500) == pytest.approx(PROFILE.prefill.seconds(1000, 500))
    assert (spec.targets.ttft_s, spec.targets.tpot_s) == (2.0, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--placement", "clever"),
        ("--admission", "maybe"),
        ("--profile", "fast"),
        ("--speed", "-1"),
        ("--speed", "0"),
        ("--load", "inf"),
        ("--load", "1e-300"),
        ("--json", "n" * 300),
        ("--json", "/proc/figures.json"),
        ("--json", "no/such/directory/figures.json"),
        ("--slo-ttft", "0"),
        ("--url", "http://127.0.0.1:1"),
        ("--engine", "real"),
    ],
)
def test_wrong_options_end_with_one_line(trace: Path, arguments: tuple[str, ...]) -> None:
    code, printed = run(str(trace), "--virtual", *arguments)
    assert code == 1
    assert printed.startswith("halfmoon: ")
    assert "Traceback" not in printed


def test_a_gateway_that_is_not_there_is_said_so(trace: Path) -> None:
    code, printed = run(str(trace), "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "no halfmoon gateway answers" in printed


def test_all_modes_are_every_pair(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    code, printed = run(
        str(trace), "--virtual", "--requests", "5", "--placement", "all", "--admission", "all", "--json", str(file)
    )
    assert code == 0, printed
    rows = json.loads(file.read_text())
    assert len({(row["placement"], row["admission"]) for row in rows}) == 4 * 3
