"""A plan's workers as services of Docker Compose."""

from __future__ import annotations

from pathlib import Path

import yaml

from halfmoon.plan.compose_file import compose_text
from halfmoon.plan.plan_file import parse_plan

PLAN = """
model: llama-3-8b
handover_codec: int8
cluster:
  workers:
  - {role: prefill, count: 2, gpu: h100, tp: 2}
  - {role: decode, count: 1, gpu: h100, max_running: 64}
  - {role: both, count: 1, gpu: cpu}
"""
ROOT = Path(__file__).parents[2]


def test_each_worker_is_a_service_with_gpus_of_its_own() -> None:
    services = yaml.safe_load(compose_text(parse_plan(PLAN, Path("plan.yaml"))))["services"]
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {name for name, one in services.items() if one.get("profiles")} == {"prefill", "decode"}
    workers = {name: one for name, one in services.items() if "command" in one}
    assert list(workers) == ["prefill-0", "prefill-1", "decode-0", "both-0"]
    for name, one in workers.items():
        role = name.rsplit("-", 1)[0]
        assert f"--role={role}" in one["command"]
        image = "decode" if role == "decode" else "prefill"
        expected = base[image if role == "both" else f"{image}-gpu"]
        port = expected["command"][0].rpartition(":")[2]
        assert {f"--listen=0.0.0.0:{port}", f"--advertise={name}:{port}"} <= set(one["command"])
        assert {*expected["command"]} <= {*one["command"]}
        assert set(one["volumes"]) == set(expected["volumes"])
        assert one["networks"] == {"default": {"aliases": [image]}}
        own = {"command", "environment", "volumes", "networks", "scale", "deploy", "profiles"}
        assert {key: one[key] for key in one if key not in own} == {
            key: expected[key] for key in expected if key not in own
        }
        model = f"HALFMOON_{image.upper()}_MODEL"  # the command has it, and else the plan's
        assert one["environment"] == {
            key: expected["environment"][key] for key in expected["environment"] if key != model
        }
    gpus = [
        device["device_ids"]
        for one in workers.values()
        for device in one.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", ())
    ]
    assert gpus == [["0", "1"], ["2", "3"], ["4"]]
    assert services["gateway"]["environment"] == {"HALFMOON_GATEWAY_HANDOVER_CODEC": "int8"}
