"""`halfmoon simulate`: what it prints, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app

CLUSTER = """
latency: distserve:opt-13b
workers:
  - {role: prefill, max_batch_tokens: 60000}
  - {role: decode, max_running: 200}
network: {handover: pull, bytes_per_s: 600e9, latency_s: 0}
admission: off
targets: {ttft_s: 0.2, tpot_s: 0.1}
"""


def run(tmp_path: Path, *options: str, cluster: str = CLUSTER, rows: Any = None) -> tuple[int, str, str]:
    path, workload = tmp_path / "cluster.yaml", tmp_path / "w.json"
    path.write_text(cluster)
    default = [{"start_time": 10.0 * number, "prompt_len": 512, "output_len": 64} for number in range(5)]
    workload.write_text(json.dumps(default if rows is None else rows))
    command = ["simulate", "--cluster", str(path), "--workload", str(workload), *options]
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, command)
    return done.exit_code, done.stdout, done.stderr


def test_json_has_every_request(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "--json")
    assert code == 0
    found = json.loads(text)
    assert found["ttft_s"]["p50"] == pytest.approx(0.0752, abs=5e-5)
    assert [row["start_time"] for row in found["requests"]] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert all(row["ttft_s"] == pytest.approx(0.0752, abs=5e-5) for row in found["requests"])
    assert found["attainment"] == 1.0
    assert found["is_met"]
    assert found["goodput_per_s"] == pytest.approx(5 / 40)


def test_a_request_without_a_second_token_has_no_tpot(tmp_path: Path) -> None:
    _, text, _ = run(tmp_path, "--json", rows=[{"start_time": 0, "prompt_len": 10, "output_len": 1}])
    assert json.loads(text)["requests"][0]["tpot_s"] is None


def test_requests_are_told_in_the_order_of_their_file(tmp_path: Path) -> None:
    rows = [{"start_time": at, "prompt_len": length, "output_len": 2} for at, length in ((9, 30), (-1, 10), (4, 20))]
    found = json.loads(run(tmp_path, "--json", rows=rows)[1])["requests"]
    assert [(row["start_time"], row["prompt_len"]) for row in found] == [(10.0, 30), (0.0, 10), (5.0, 20)]
    earliest = json.loads(run(tmp_path, "--json", "--requests", "2", rows=rows)[1])["requests"]
    assert [row["prompt_len"] for row in earliest] == [10, 20]


def test_the_table_says_what_is_missed(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "--ttft", "0.01")
    assert code == 0
    assert "attainment (joint) 0.0%, which is less than asked for" in text


def test_marginal_takes_each_target_for_itself(tmp_path: Path) -> None:
    _, text, _ = run(tmp_path, "--ttft", "0.01", "--criterion", "marginal", "--json")
    found = json.loads(text)
    assert (found["attainment_ttft"], found["attainment_tpot"], found["attainment"]) == (0.0, 1.0, 0.0)


def test_gaps_between_tokens_have_a_target_of_their_own(tmp_path: Path) -> None:
    """The steps of a lone request grow with its context: the mean of them is within what the last is not."""
    found = json.loads(run(tmp_path, "--json")[1])
    row = found["requests"][0]
    assert row["tpot_s"] < row["tail_gap_s"] < row["longest_gap_s"]
    between = str((row["tail_gap_s"] + row["longest_gap_s"]) / 2)
    for tbt_of, met in (("longest", 0.0), ("longest-tenth", 1.0)):
        options = "--tpot", between, "--tbt", between, "--tbt-of", tbt_of
        found = json.loads(run(tmp_path, *options, "--json")[1])
        assert (found["attainment_tpot"], found["attainment_tbt"], found["attainment"]) == (1.0, met, met)
        assert f"TBT ({tbt_of})" in run(tmp_path, *options)[1]
    cluster = CLUSTER.replace("tpot_s: 0.1", f"tpot_s: 0.1, tbt_s: {between}, tbt_of: longest-tenth")
    assert json.loads(run(tmp_path, "--json", cluster=cluster)[1])["targets"]["tbt_of"] == "longest-tenth"


def test_drawn_workloads_repeat_with_their_seed(tmp_path: Path) -> None:
    options = ["--workload", "chat", "--rate", "1", "--requests", "50", "--json", "--seed"]
    texts = [run(tmp_path, *options, seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "cluster", "says"),
    [
        (["--workload", "chat"], CLUSTER, "needs --rate"),
        (["--workload", "nonsense"], CLUSTER, "known are chat"),
        (["--latency", "roofline:opt-13b@v100"], CLUSTER, "known are a100-80g"),
        ([], CLUSTER.replace("latency: distserve:opt-13b", ""), "give --latency"),
        ([], CLUSTER + "colour: red", "unknown field 'colour': known are admission"),
        ([], CLUSTER.replace("handover: pull", "handover: throw"), "network.handover"),
        ([], CLUSTER.replace("role: decode", "role: prefill"), "workers that decode"),
        ([], CLUSTER.replace("role: decode", "role: baker"), "workers.1.role"),
        ([], "]", "cannot be read"),
        ([], "workers: !!timestamp x", "cannot be read"),
        ([], CLUSTER.replace("role: decode", "role: decode, kv_tokens: 10"), "holds no block of 64 tokens"),
        ([], CLUSTER + "contention: {prefill_beside_decode: .nan}", "contention must be finite"),
        (["--workload", "chat", "--rate", "1", "--seed", "-1"], CLUSTER, "a seed must not be negative, got -1"),
        (["--workload", "chat", "--rate", "1e-300"], CLUSTER, "give a higher rate"),
        (["--workload", "in=99999999999999999999,out=3", "--rate", "1"], CLUSTER, "is not a workload"),
        (["--workload", "in=9999999999,out=3", "--rate", "1"], CLUSTER, "is not a workload"),
        (["--rate", "inf"], CLUSTER, "the arrival rate must be above 0 per second, and finite, got inf"),
        (["--latency", "n" * 300], CLUSTER, "is not a latency source"),
        ([], CLUSTER.replace("600e9", "1.0e-300"), "bytes_per_s must be above 0: at least 1"),
        ([], CLUSTER.replace("latency_s: 0", "latency_s: .inf"), "latency_s must not be negative, and finite"),
        ([], CLUSTER + "stores: {count: 2147483648, memory_tokens: 9}", "stores must be at most 4,096"),
        ([], CLUSTER.replace("role: decode", "role: decode, first_node: 2147483648"), "first_node"),
        ([], CLUSTER.replace("role: decode", f"role: decode, kv_tokens: {10**30}"), "kv_tokens"),
        ([], CLUSTER.replace("role: decode", "role: decode, count: 100000000"), "less than or equal to 100000"),
        (
            [],
            CLUSTER.replace("role: decode", "role: decode, count: true"),
            "workers.1.count: must be a number, not true",
        ),
        ([], CLUSTER.replace("latency_s: 0", "latency_s: true"), "network.latency_s: must be a number, not true"),
        ([], CLUSTER + "block_tokens: true", "block_tokens: must be a number, not true"),
        ([], CLUSTER + "failures: [{worker: 1, at_s: true}]", "failures.at_s: must be a number, not true"),
        ([], CLUSTER + "failures: [{worker: 1, at_s: .inf}]", "at_s must not be negative, and finite"),
        ([], CLUSTER + "failures: [{worker: 1, at_s: 1, back_s: .inf}]", "back_s must be after at_s, and finite"),
    ],
)
def test_bad_input_is_explained(tmp_path: Path, options: list[str], cluster: str, says: str) -> None:
    code, _, error = run(tmp_path, *options, cluster=cluster)
    assert code == 2
    assert says in " ".join(error.replace("│", " ").split())
