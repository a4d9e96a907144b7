"""`halfmoon config`, and the flags of `halfmoon up`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.cli.up.flags import PANELS, sentence
from halfmoon.cli.up.up_flags import config_of
from halfmoon.errors import InvalidRequest

EXAMPLE = Path(__file__).parents[3] / "docs" / "guide" / "examples" / "halfmoon.yaml"


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = CliRunner(env={"COLUMNS": "250", "TERM": "dumb", **environment}).invoke(app, arguments)
    return done.exit_code, done.stdout, " ".join(done.stderr.replace("│", " ").split())


def shown(*flags: str, **environment: str) -> dict[str, dict[str, object]]:
    code, text, error = run("config", "show", *flags, **environment)
    assert code == 0, error
    found: dict[str, dict[str, object]] = yaml.safe_load(text)
    return found


def test_what_is_shown_is_defaults_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "halfmoon.yaml"
    file.write_text("gateway: {port: 1, replicas: 2}\nworkers: {prefill: {count: 2, max_running: 4}}\n")
    found = shown("--config", str(file), "--port", "9", "--set", "gateway.request_deadline_s=60", "--prefill", "3")
    gateway = found["gateway"]
    assert (gateway["port"], gateway["replicas"], gateway["request_deadline_s"]) == (9, 2, 60)
    assert found["workers"]["prefill"] == [{"count": 3, "max_running": 4}]
    assert found["workers"]["decode"] == [{"count": 1}]
    assert (gateway["slo"], found["stores"]["dram_bytes"]) == ("default", "512MiB")


def test_the_built_in_class_is_shown_unless_it_is_off() -> None:
    default = shown()["classes"]["default"]
    assert isinstance(default, dict)
    assert (default["ttft_s"], default["tbt_s"], default["early_rejection"]) == (30.0, 1.0, "overload")
    assert shown("--slo", "off")["classes"] == {}
    assert shown("--set", "gateway.slo=off")["gateway"]["slo"] == "off", "YAML reads off as false"


def test_secrets_are_not_shown() -> None:
    flags = [
        "--api-key",
        "hush",
        "--ledger-url",
        "postgresql://u:hush@h/d",
        "--cold-url",
        "s3://b?secret_access_key=hush",
    ]
    flags += ["--otlp-endpoint", "http://me:hush@host:4317"]
    rules = "{kind: api_key, value: hush}, {kind: header, header: x-team, value: hush}, {kind: model, value: demo}"
    flags += ["--set", f"classes={{gold: {{rules: [{rules}]}}}}"]
    flags += ["--set", f"security.cluster_secret={'hush' * 10}"]
    code, text, _ = run("config", "show", *flags, HALFMOON_OPERATOR_TOKEN="hush")
    assert code == 0
    assert "hush" not in text
    assert "***" in text


def test_check_says_every_mistake_or_what_would_be_started(tmp_path: Path) -> None:
    code, text, _ = run("config", "check", str(EXAMPLE))
    assert (code, text.split(": ")[1]) == (0, "demo on 1 prefill + 1 decode workers\n")
    file = tmp_path / "halfmoon.yaml"
    file.write_text("model: {}\ngateway:\n  prot: 1\nstores: {count: 0}")
    code, _, error = run("config", "check", str(file))
    assert code == 1
    assert "halfmoon.yaml:3: gateway.prot" in error
    assert "halfmoon.yaml:4: stores.count" in error


def test_the_schema_takes_the_example_and_refuses_unknown_fields() -> None:
    code, text, _ = run("config", "schema")
    assert code == 0
    validator = Draft202012Validator(json.loads(text))
    assert validator.is_valid({"gateway": {"port": 1}})
    assert not validator.is_valid({"gateway": {"prot": 1}})


def test_a_wrong_flag_is_refused_by_name() -> None:
    code, _, error = run("up", "--kv-memory", "much")
    assert code == 2
    assert "--kv-memory: " in error
    code, _, error = run("up", "--set", "gateway.prot=1")
    assert "--set gateway.prot: unknown field; did you mean port?" in error
    for text, says in (
        ("gatway.x.y=1", "gatway.x.y: gatway: unknown"),
        ("gateway={prot: 1}", "gateway: gateway.prot: "),
    ):
        code, _, error = run("up", "--set", text)
        assert (code, f"--set {says}" in error) == (2, True), error


def test_a_flag_for_a_number_that_may_be_null_takes_null() -> None:
    assert shown("--metrics-port", "null")["observability"]["metrics_port"] is None
    assert shown("--metrics-port", "9100")["observability"]["metrics_port"] == 9100
    code, _, error = run("config", "show", "--metrics-port", "many")
    assert (code, "--metrics-port: Input should be a valid integer" in error) == (2, True)


def test_help_has_its_panels_in_order_and_a_sentence_for_every_flag() -> None:
    code, text, _ = run("up", "--help")
    assert code == 0
    places = [text.index(f"─ {panel} ─") for panel in ("Configuration file", *PANELS, "Everything else")]
    assert places == sorted(places)
    for flag in (flag for flags in PANELS.values() for flag in flags):
        assert flag.name.split("/")[0] in text
        assert flag.field.description, flag.path
        assert sentence(flag.field.description).endswith(".")


def test_a_count_cannot_change_one_of_several_groups(tmp_path: Path) -> None:
    file = tmp_path / "halfmoon.yaml"
    file.write_text("workers: {decode: [{}, {max_running: 3}]}")
    with pytest.raises(InvalidRequest, match="2 groups of decode workers"):
        config_of({"config": file, "decode": 3})
    with pytest.raises(InvalidRequest, match="give one of them"):
        config_of({"config": file, "plan": file})
