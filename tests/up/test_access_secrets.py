"""Keys and tokens from files and the environment: where they go, and where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.api_keys import key_digest
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import parse_config
from halfmoon.up.specs.service_specs import gateway_spec, other_specs
from halfmoon.up.up_options import PreparedModel, UpOptions
from services.gateway.control.active_tenants import declared_tenants
from services.gateway.settings import GatewaySettings

MODEL = PreparedModel("/m", "m")


def options_of(tmp_path: Path, text: str) -> UpOptions:
    (tmp_path / "keys").write_text("acme hm-of-file\n")
    (tmp_path / "token").write_text("token-of-file\n")
    return up_options(parse_config(text.replace("DIR", str(tmp_path)), "halfmoon.yaml"))


def test_files_reach_gateway_planner_and_console_without_command_lines(tmp_path: Path) -> None:
    options = options_of(tmp_path, "security: {api_keys_file: DIR/keys, operator_token_file: DIR/token}")
    specs = [gateway_spec(options, MODEL), *other_specs(options, MODEL, "x:1", ["x:2"], "x:3")]
    by_name = {spec.name: spec for spec in specs}
    assert not [spec.name for spec in specs if "of-file" in " ".join(spec.arguments)]
    gateway, planner = by_name["gateway"].environment, by_name["planner"].environment
    assert gateway["HALFMOON_GATEWAY_API_KEYS_FILE"] == str(tmp_path / "keys")
    assert gateway["HALFMOON_GATEWAY_OPERATOR_TOKEN"] == planner["HALFMOON_PLANNER_OPERATOR_TOKEN"] == "token-of-file"
    assert options.console_key == "hm-of-file"


def test_tenants_of_a_file_reach_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"tenants: {{acme: {{keys: ['sha256:{key_digest('k')}'], kv_bytes: 1GiB, requests_per_minute: 5}}}}"
    for name, value in gateway_spec(options_of(tmp_path, text), MODEL).environment.items():
        monkeypatch.setenv(name, value)
    table = declared_tenants(GatewaySettings(state_dir=tmp_path)).table
    assert table.keys[key_digest("k")].tenant == "acme"
    assert (table.tenants["acme"].kv_bytes, table.tenants["acme"].requests_per_minute) == (1 << 30, 5)


def test_wrong_files_and_names_are_told(tmp_path: Path) -> None:
    for text, said in (
        ("security: {operator_token_file: DIR/absent}", "cannot be read"),
        ("security: {api_keys_file: DIR/absent}", "cannot be read"),
        ("tenants: {'a b': {}}", "tenant's name"),
        ("tenants: {a: {classes: [gold]}}", "names the class 'gold'"),
        ("tenants: {a: {default_class: gold}}\nclasses: {silver: {}}", "there are default, silver"),
        ("tenants: [a]", "halfmoon.yaml:1: tenants: must be a mapping"),
        ("tenants: {a: {classes: [x], default_class: y}}", "must be one of classes"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            options_of(tmp_path, text)


def test_up_takes_keys_from_the_environment_and_its_help_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[UpOptions] = []
    monkeypatch.setattr("halfmoon.cli.app.run_up", lambda options, console: started.append(options))
    assert "HALFMOON_API_KEYS" in CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "200"}).stdout
    CliRunner().invoke(app, ["up"], env={"HALFMOON_API_KEYS": "hm-a hm-b"})
    assert [options.api_keys for options in started] == [("hm-a", "hm-b")]
