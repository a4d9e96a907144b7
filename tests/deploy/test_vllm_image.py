"""The image of workers with vLLM: a release that they work with, and settings that they have."""

from __future__ import annotations

import re

import yaml

from halfmoon.vllm_engine.frontend.versions import check_release
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from tests.deploy.deployments import ROOT, compose_gpu


def test_its_vllm_is_one_that_we_work_with() -> None:
    for file in ("deploy/vllm/Dockerfile", "deploy/vllm/compose.yml", "scripts/vllm_env"):
        (release,) = re.findall(r"(?:vllm-openai:v|release=)(\d+\.\d+\.\d+)", (ROOT / file).read_text())
        check_release(release)


def test_its_variables_are_settings_of_the_service() -> None:
    services = yaml.safe_load((ROOT / "deploy/vllm/compose.yml").read_text())["services"]
    own = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert services.keys() == {"prefill", "decode"} | compose_gpu().keys()
    for name in compose_gpu():
        assert services[name] == services[name.removesuffix("-gpu")]
    for name, settings in (("prefill", PrefillSettings), ("decode", DecodeSettings)):
        prefix = f"HALFMOON_{name.upper()}_"
        names = [variable.removeprefix(prefix).lower() for variable in services[name]["environment"]]
        assert set(names) <= settings.model_fields.keys()
        assert services[name]["entrypoint"][-1] == name in own
