"""A container takes its part of the configuration file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.up.service import SERVICES, service_start

CONFIG = """
model: {path: ./llama, alias: [best]}
workers: {all: {dtype: float32}, prefill: {max_batch_tokens: 512}, decode: {max_running: 3}}
gateway: {port: 1, placement: random}
stores: {dram_bytes: 1GiB, count: 2, disk_dir: /d}
classes: {gold: {ttft_s: 1}}
security: {api_key: [k], operator_token: o}
observability: {log_level: DEBUG, metrics_port: 5}
planner: {processes: 3}
"""


def told(tmp_path: Path, service: str, *arguments: str, text: str = CONFIG, **environment: str) -> dict[str, str]:
    file = tmp_path / "halfmoon.yaml"
    file.write_text(text)
    start = service_start([service, *arguments], {"HALFMOON_CONFIG": str(file), **environment})
    assert start.arguments[-len(arguments) - 1 :][1:] == arguments
    prefix = f"HALFMOON_{service.upper()}_"
    return {name.removeprefix(prefix): text for name, text in start.environment.items() if name.startswith(prefix)}


def test_each_service_takes_its_part(tmp_path: Path) -> None:
    gateway = told(tmp_path, "gateway", "--port=8000")
    assert (gateway["PLACEMENT"], gateway["MODEL"], gateway["LOG_LEVEL"]) == ("random", "./llama", "DEBUG")
    assert json.loads(gateway["MODEL_ALIAS"]) == ["./llama", "best"]
    assert (json.loads(gateway["API_KEY"]), gateway["OPERATOR_TOKEN"]) == (["k"], "o")
    assert json.loads(gateway["CLASSES"]) == {"gold": {"ttft_s": 1}}
    assert not {"PORT", "REPLICAS", "METRICS_PORT"} & gateway.keys()
    decode = told(tmp_path, "decode")
    assert (decode["DTYPE"], decode["MAX_RUNNING"], decode["MODEL"]) == ("float32", "3", "./llama")
    assert "MAX_BATCH_TOKENS" not in decode
    assert not {"COUNT", "OPERATOR_TOKEN"} & decode.keys()
    store = told(tmp_path, "kvstore")
    assert store["DRAM_BYTES"] == str(1 << 30)
    assert not {"COUNT", "DISK_DIR"} & store.keys()
    assert told(tmp_path, "planner")["PROCESSES"] == "3"
    assert told(tmp_path, "console") == {"OPERATOR_TOKEN": "o", "API_KEY": "k"}


def test_every_service_takes_the_cluster_secret(tmp_path: Path) -> None:
    file = tmp_path / "halfmoon.yaml"
    file.write_text("security: {cluster_secret_file: /run/secret}")
    for service in SERVICES:
        environment = {"HALFMOON_CONFIG": str(file)}
        given = service_start([service], environment).environment
        assert given["HALFMOON_CLUSTER_SECRET_FILE"] == "/run/secret"
        assert not [name for name in given if "CLUSTER" in name and name != "HALFMOON_CLUSTER_SECRET_FILE"]
        given = service_start([service], {**environment, "HALFMOON_CLUSTER_SECRET": "own"}).environment
        assert "HALFMOON_CLUSTER_SECRET_FILE" not in given


def test_variables_win_over_the_file_and_empty_ones_say_nothing(tmp_path: Path) -> None:
    given = {"HALFMOON_GATEWAY_MODEL": "./mine", "HALFMOON_GATEWAY_PLACEMENT": ""}
    gateway = told(tmp_path, "gateway", **given)
    assert (gateway["MODEL"], gateway["PLACEMENT"]) == ("./mine", "random")
    assert json.loads(gateway["MODEL_ALIAS"])[0] == "./mine"


def test_a_worker_is_of_the_role_that_its_arguments_say(tmp_path: Path) -> None:
    text = "workers: {both: {max_running: 7}}"
    assert told(tmp_path, "prefill", "--role=both", text=text)["MAX_RUNNING"] == "7"
    with pytest.raises(InvalidRequest, match="names no prefill workers"):
        told(tmp_path, "prefill", text=text)
    with pytest.raises(InvalidRequest, match="has 2 groups of decode workers"):
        told(tmp_path, "decode", text="workers: {decode: [{}, {}]}")


def test_workers_of_a_plan_have_their_limits_in_their_arguments(tmp_path: Path) -> None:
    text = "cluster: {workers: [{role: both}]}\nworkers: {all: {max_running: 5}}"
    assert told(tmp_path, "prefill", "--role=both", text=text)["MAX_RUNNING"] == "5"


def test_without_a_file_nothing_is_added() -> None:
    start = service_start(["kvstore", "--listen=x:1"], {"A": "b"})
    assert start == (("-m", "services.kvstore", "--listen=x:1"), {"A": "b"})
    with pytest.raises(InvalidRequest, match="unknown service 'cook'"):
        service_start(["cook"], {})
