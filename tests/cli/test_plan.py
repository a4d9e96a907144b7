"""`halfmoon plan`: what it finds, writes and says of what cannot be; and what `halfmoon up --plan` makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.errors import InvalidRequest
from halfmoon.plan.planning import make_plan
from halfmoon.plan.plot import plot_spec
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.summary import summary_of
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import Override, read_config
from halfmoon.up.specs.service_specs import other_specs
from halfmoon.up.this_host.gpus import whole_gpus
from halfmoon.up.up_options import PreparedModel, UpOptions

BASE = {
    "--model": "opt-13b",
    "--latency": "distserve:opt-13b",
    "--gpu": "a100-80g",
    "--gpus-per-node": "4",
    "--workload": "in=512,out=64",
    "--ttft": "0.2",
    "--tpot": "0.1",
    "--requests": "60",
    "--jobs": "1",
}


def run(tmp_path: Path, *flags: str, **changed: str) -> tuple[int, str, str]:
    options = {**BASE, "--output": str(tmp_path / "plan.yaml")}
    options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    command = ["plan", *(part for pair in options.items() for part in pair), *flags]
    done = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"}).invoke(app, command)
    return done.exit_code, done.stdout, " ".join(done.stderr.replace("│", " ").split())


def planned_options(path: Path, *overrides: Override) -> UpOptions:
    on_cpu = Override("workers.all.device", "cpu", "--device")
    no_console = Override("console.enabled", False, "--no-console")
    return up_options(read_config(path, [on_cpu, no_console, *overrides]))


def found_of(tmp_path: Path, **changed: str) -> dict[str, Any]:
    code, text, error = run(tmp_path, "--json", **changed)
    assert code == 0, error
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_fewest_gpus_hold_the_rate_and_the_same_question_has_the_same_plan(tmp_path: Path) -> None:
    found = found_of(tmp_path, rate="8")
    assert found == found_of(tmp_path, rate="8")
    gpus = [one["num_gpus"] for one in found["layouts"]]
    assert gpus == sorted(gpus)
    assert max(gpus) <= 4
    for one in found["layouts"]:
        assert one["attainment_joint"] >= 0.9
        assert one["goodput_per_s"] >= 8 / 1.03
    assert set(found["sensitivity"]) == {"traffic +20 %", "outputs +50 %", "prompts +50 %"}


def test_what_is_written_can_be_simulated_and_started(tmp_path: Path) -> None:
    tmp_path /= "[plans]"  # is printed whole
    tmp_path.mkdir()
    code, text, _ = run(tmp_path, affinity="low", objective="goodput-per-dollar")
    assert code == 0
    assert f"plan: {tmp_path / 'plan.yaml'}; start it with `halfmoon up --plan" in text
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(written["cluster"]))
    spec = read_cluster(cluster)
    assert spec.num_devices == written["expected"]["gpus"]
    options = planned_options(tmp_path / "plan.yaml")
    assert options.model == "opt-13b"
    specs = other_specs(options, PreparedModel("/m", "m"), "x:1", ["x:2"], "x:3")
    workers = [one for one in specs if "--tensor-parallel" in one.arguments]
    assert len(workers) == spec.num_workers
    devices = [
        int(one.arguments[one.arguments.index(f"--{kind}-parallel") + 1])
        for one in workers
        for kind in ("tensor", "pipeline")
    ]
    assert sum(a * b for a, b in zip(devices[::2], devices[1::2], strict=True)) == spec.num_devices


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gpu": "v100"}, "known are a100-80g"),
        ({"ttft": "0.01"}, "TTFT 0.01 s cannot be met: a prompt of 512 tokens alone on an idle worker takes 0.0"),
        ({"tpot": "0.001"}, "TPOT 0.001 s cannot be met"),
        (
            {"latency": "roofline:opt-13b", "gpu": "l40s", "gpus_per_node": "1", "workload": "in=32000,out=1"}
            | {"context": "40000"},
            "memory: the longest request is 32,001 tokens long, and no worker of 1 x l40s holds more than",
        ),
        ({"rate": "-1"}, "rate must be above 0"),
        ({"rate": "0"}, "rate must be above 0"),
        ({"rate": "nan"}, "rate must be above 0"),
        ({"ttft": "0"}, "target for TTFT must be a time above 0"),
        ({"tpot": "0"}, "target for TPOT must be a time above 0"),
        ({"requests": "9" * 26}, "at most 10,000,000 requests are drawn"),
        ({"jobs": "9" * 26}, "less than or equal to 1024"),
        ({"gpu": "h100:9999999x8"}, "at most 16,384 GPUs"),
        ({"ttft": "nan"}, "target for TTFT must be a time above 0"),
        ({"tbt": "-1"}, "target for TBT must be a time above 0"),
        ({"tbt": "0.001"}, "TBT 0.001 s cannot be met"),
        ({"gpu": "h100:2x8,h100:1x8"}, "named twice"),
        ({"latency": "h100=distserve:opt-13b"}, "give one for each"),
        ({"price": "a100-80g=much"}, "is not a price"),
        ({"price": "h100=2"}, "there is a price of h100, and the GPUs are a100-80g"),
        ({"decode_gpu": "h100"}, "the fleet has no h100 for decode"),
        ({"network": "0"}, "more than 0 Gbit/s"),
        ({"objective": "gpus"}, "give --rate"),
        ({"attainment": "1.5"}, "attainment is a share"),
        ({"latency": "nonsense"}, "is not a latency source"),
        ({"latency": "roofline:opt-13b@v100"}, "unknown hardware 'v100'"),
        ({"latency": "roofline:opt-13b@h100"}, "is of h100, and the GPUs are a100-80g: leave out @h100"),
        ({"seed": "-1", "workload": "chat"}, "a seed must not be negative"),
        ({"model": ""}, "no model is named"),
        ({"output": "/nowhere/plan.yaml"}, "is not a directory"),
        ({"output": "/proc/plan.yaml"}, "/proc/plan.yaml"),
        ({"output": "n" * 300}, "File name too long"),
        ({"output": "/nowhere/x.yaml", "compose": "/nowhere/./x.yaml"}, "two outputs have the same file"),
        ({"plot": "n" * 300 + ".png"}, "File name too long"),
        ({"plot": "/nowhere/plan.png"}, "/nowhere is not a directory"),
        ({"plot": "plan.pdf"}, "a plot is a .png or .html file, not plan.pdf"),
    ],
)
def test_what_cannot_be_is_explained(tmp_path: Path, changed: dict[str, str], says: str) -> None:
    code, _, error = run(tmp_path, **changed)
    assert code == 2
    assert says in error


@pytest.mark.parametrize(("name", "begins"), [("plan.png", b"\x89PNG"), ("plan.html", b"<!DOCTYPE html>")])
def test_a_plot_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("vl_convert")
    code, text, error = run(tmp_path, plot=str(tmp_path / name), rate="2")
    assert code == 0, error
    assert f"plot: {tmp_path / name}" in text
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_curves_fall_where_a_layout_holds_no_more(tmp_path: Path) -> None:
    request = PlanRequest("opt-13b", "a100-80g", "in=512,out=64", 0.2, 0.1, gpus_per_node=2, num_requests=60,
                          latency="distserve:opt-13b")  # fmt: skip
    summary = summary_of(make_plan(request, 1, with_curves=True))
    names = [one["layout"] for one in summary["curves"]]
    assert names[: len(summary["layouts"])] == [one["layout"] for one in summary["layouts"]]
    for curve, layout in zip(summary["curves"], summary["layouts"], strict=False):
        held = [rate <= layout["goodput_per_s"] for rate in curve["rate_per_s"]]
        assert all(share >= 0.9 for share, is_held in zip(curve["attainment"], held, strict=True) if is_held)
        assert curve["attainment"][-1] < 0.9
    spec = plot_spec(summary)
    assert {row["layout"] for row in spec["data"]["values"]} == set(names)
    first, one = spec["data"]["values"][0], summary["curves"][0]
    assert first["rate"] == pytest.approx(one["rate_per_s"][0] / one["num_gpus"])
    rules = spec["hconcat"][0]["layer"]
    assert rules[0]["data"]["values"][0]["y"] == 0.9, "the line of the goal"


def test_without_the_library_a_plot_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, _, error = run(tmp_path, plot=str(tmp_path / "plan.png"))
    assert code == 2
    assert "pip install 'halfmoon[plot]'" in error
    assert not (tmp_path / "plan.yaml").exists(), "it is said before the search"


@pytest.mark.parametrize("text", ["]", "modell: x", "model: x\ncluster: {workers: [{role: baker}]}"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"plan\.yaml"):
        planned_options(path)


def test_workers_of_one_role_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    groups = "{role: both, tp: 2, count: 2}, {role: both, count: 0}, {role: both, pp: 4, max_running: 7}"
    path.write_text(f"model: x\ncluster: {{workers: [{groups}]}}")
    options = planned_options(path)
    assert (options.num_prefill, options.num_decode, options.num_both) == (0, 0, 3)
    assert [one.num_gpus for one in options.worker_starts["both"]] == [2, 2, 4]
    specs = other_specs(options, PreparedModel("/m", "m"), "x:1", ["x:2"], "x:3")
    workers = {one.name: one.arguments[-6:] for one in specs if one.name.startswith("both")}
    assert workers["both-1"][-4:] == ("--tensor-parallel", "2", "--pipeline-parallel", "1")
    assert workers["both-2"] == ("--tensor-parallel", "1", "--pipeline-parallel", "4", "--max-running", "7")


def test_a_fleet_that_is_too_small_is_never_told_to_have_as_few_gpus(tmp_path: Path) -> None:
    at_most = found_of(tmp_path, gpus_per_node="1")["layouts"][0]["goodput_per_s"]
    _, _, error = run(tmp_path, gpus_per_node="1", rate=str(1.2 * at_most))
    assert "or give about 2 GPUs" in error


def test_a_plan_and_counts_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("model: x\ncluster: {workers: [{role: both}]}")
    command = ["up", "--plan", str(tmp_path / "plan.yaml"), "--prefill", "1"]
    done = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"}).invoke(app, command)
    assert done.exit_code == 2
    assert "(--prefill, --decode and --both)" in done.stderr


def test_workers_of_several_gpus_have_their_own() -> None:
    seen = [one["CUDA_VISIBLE_DEVICES"] for one in whole_gpus(dict.fromkeys("abc", ""), [2, 1])]
    assert seen == ["a,b", "c"]
    assert whole_gpus({}, [2, 1]) == [{}, {}]
    with pytest.raises(InvalidRequest, match="need 4 GPUs, and this host has 3"):
        whole_gpus(dict.fromkeys("abc", ""), [2, 2])


def test_simulated_workers_of_a_plan_need_no_files_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: llama-3-8b\ncluster: {workers: [{role: both, count: 3, gpu: h100, latency: 'roofline:llama-3-8b'}]}\n"
    )
    assert planned_options(path, Override("engine", "sim", "--engine")).model == "demo"
    assert planned_options(path, Override("engine", "sim", "--engine")).num_both == 3
    assert planned_options(path).model == "llama-3-8b"
    assert planned_options(path, Override("model", "./mine", "--model")).model == "./mine"
