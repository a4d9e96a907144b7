"""`halfmoon profile` and `profiles`, and who reads what they keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.cli.profile_store import keep_profile, profile_file, stored_profile
from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, write_profile
from halfmoon.sim.latency_sources.worker_profile import load_profile

FOUND = MeasuredProfile.model_validate(
    {
        "model": "demo",
        "device": "cpu",
        "kv_tokens": 64_000,
        "kv_bytes_per_token": 1e3,
        "limits": {"context_tokens": 2048, "max_batch_tokens": 256, "chunk_tokens": 32, "max_running": 8},
        "prefill": [
            {"new_tokens": 100, "seconds": 0.1},
            {"new_tokens": 200, "seconds": 0.2},
            {"new_tokens": 150, "seconds": 0.1, "is_held_out": True},
        ],
        "step": [{"batch": 1, "context_tokens": 100, "seconds": 0.01}],
        "transfer": [
            {"num_bytes": 1000, "seconds": 0.001, "transport": "shm"},
            {"num_bytes": 1000, "seconds": 9.0, "transport": "grpc"},
        ],
        "beside": [{"work": "prefill", "neighbour": "decode", "slowdown": 2.0}],
        "request_s": 0.5,
    }
)
CLUSTER = "workers: [{role: prefill, first_node: 0}, {role: decode, first_node: 0}]"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    return done.exit_code, done.output


def test_a_stored_profile_is_listed_and_simulated_with(tmp_path: Path) -> None:
    assert "make one" in run("profiles", "--state-dir", str(tmp_path))[1]
    keep_profile("mine", FOUND, tmp_path, None)
    code, text = run("profiles", "--state-dir", str(tmp_path))
    assert (code, "mine" in text, "50.0% / 0.0%" in text) == (0, True, True)  # the held-out prompt was a third quicker
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    work = ("--workload", "in=100,out=2", "--rate", "0.1", "--requests", "5", "--arrivals", "constant", "--json")
    which = ("--latency", "ledger:mine", "--state-dir", str(tmp_path))
    code, text = run("simulate", "--cluster", str(cluster), *work, *which)
    found = json.loads(text)
    assert code == 0
    assert found["ttft_s"]["p50"] == pytest.approx(0.5 + 0.1)  # `request_s`, and the prompt
    assert found["latency"][0]["fit_error"]["prefill"] == pytest.approx(0.5)
    cluster.write_text(f"latency: ledger:mine\n{CLUSTER}")
    code, text = run("simulate", "--cluster", str(cluster), *work, "--state-dir", str(tmp_path))
    assert (code, json.loads(text)) == (0, found)


@pytest.mark.parametrize("nests", [False, True])
def test_a_profile_says_whether_short_prompts_run_in_the_middle_of_steps(tmp_path: Path, nests: bool) -> None:
    profile = FOUND.model_copy(update={"limits": FOUND.limits.model_copy(update={"nests_steps": nests})})
    path, cluster = tmp_path / "mine.json", tmp_path / "cluster.yaml"
    write_profile(path, profile)
    assert load_profile(str(path)).nests_steps == nests
    cluster.write_text("workers: [{role: prefill}, {role: prefill, nests_steps: false}, {role: decode}]")
    first, other, _ = read_cluster(cluster, str(path)).groups
    assert (first.limits.nests_steps, other.limits.nests_steps) == (nests, False)
    cluster.write_text("workers: [{role: prefill, nests_steps: true}, {role: decode}]")
    assert read_cluster(cluster, "llama3-8b-h100").groups[0].limits.nests_steps


def test_a_directory_that_cannot_be_holds_no_profile() -> None:
    code, text = run("profiles", "--state-dir", "n" * 300)
    assert (code, text.strip()) == (0, "no profile has been measured yet: make one with `halfmoon profile`")


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="halfmoon profile"):
        stored_profile("mine", tmp_path, None)
    keep_profile("mine", FOUND, tmp_path, None)
    with pytest.raises(InvalidRequest, match="it has mine"):
        stored_profile("yours", tmp_path, None)


def test_simulated_workers_read_a_stored_profile_as_a_file(tmp_path: Path) -> None:
    keep_profile("mine", FOUND, tmp_path, None)
    profile = load_profile(profile_file("ledger:mine", tmp_path))
    assert (profile.max_batch_tokens, profile.chunk_tokens, profile.max_running) == (256, 32, 8)
    assert profile.latency.prefill_s(200) == pytest.approx(0.2)
    assert profile.link_bytes_per_s == pytest.approx(1e6)  # by the transport that comes first
    assert profile_file("instant", tmp_path) == "instant"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--name", "a b"), "a name is"), (("--name", "a", "--output", "no/such/dir.json"), "no/such")],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    code, told = run("profile", *arguments, "--gateway", "http://127.0.0.1:1", "--state-dir", str(tmp_path))
    assert code != 0
    assert text in told


def test_no_gateway_is_told(tmp_path: Path) -> None:
    out = str(tmp_path / "x.json")
    code, told = run("profile", "--name", "a", "--gateway", "http://127.0.0.1:1", "--output", out)
    assert code == 1
    assert "no halfmoon gateway" in told
    assert not Path(out).exists()
