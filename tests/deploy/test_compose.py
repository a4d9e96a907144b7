"""docker-compose.yml, the Dockerfile and Prometheus agree on services, ports and the configuration file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from halfmoon.rpc.credentials.issue import CREDENTIAL_FILE
from halfmoon.rpc.credentials.sources import FILE_VARIABLE
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, paths_in
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.service import CONFIG_VARIABLE, SERVICES
from halfmoon.up.state.metrics_targets import TARGETS_FILE
from tests.deploy.deployments import ROLES, ROOT, SETTINGS, compose, compose_gpu, compose_others, dockerfile, options

MOUNTED = Path("/run/halfmoon")
PROMETHEUS = ROOT / "deploy" / "prometheus"


def scraped(name: str) -> set[str]:
    found: set[str] = set()
    for one in yaml.safe_load((PROMETHEUS / name).read_text())["scrape_configs"]:
        found.update(*(static["targets"] for static in one.get("static_configs", ())))
        for names in one.get("dns_sd_configs", ()):
            assert names["type"] == "A"
            found.update(f"{name}:{names['port']}" for name in names["names"])
    return found


def test_prometheus_scrapes_the_ports_that_compose_opens() -> None:
    services = compose()
    opened = {
        f"{name}:{options(one)['metrics-port']}" for name, one in services.items() if "metrics-port" in options(one)
    }
    opened.add(f"gateway:{options(services['gateway'])['port']}")
    assert scraped("prometheus.yml") == opened
    assert {"prefill", "decode", "kvstore", "planner"} == {target.split(":")[0] for target in opened} - {"gateway"}


def test_prometheus_reads_the_list_that_up_writes() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus-up.yml").read_text())["scrape_configs"]
    (file,) = job["file_sd_configs"][0]["files"]
    state_dir = SystemConfig().state_dir
    assert (PROMETHEUS / file).resolve() == (ROOT / state_dir / TARGETS_FILE).resolve()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_compose_says_settings_that_there_are(name: str) -> None:
    service, fields = compose()[name], SETTINGS[name].model_fields
    assert {option.replace("-", "_") for option in options(service)} <= fields.keys()
    prefix = f"HALFMOON_{name.upper()}_"
    variables = {one for one in service["environment"] if one.startswith("HALFMOON_")} - {
        CONFIG_VARIABLE,
        FILE_VARIABLE,
        *TLS_VARIABLES,
    }
    assert {one.removeprefix(prefix).lower() for one in variables} <= fields.keys()


def test_every_container_takes_its_part_of_the_same_file() -> None:
    services = compose()
    del services["secret"]
    assert set(services) == set(SERVICES)
    assert not any("container_name" in service for service in services.values())  # so that they can be scaled
    mount = "${HALFMOON_CONFIG:-./deploy/halfmoon.yaml}:/etc/halfmoon.yaml:ro"
    for service in services.values():
        assert mount in service["volumes"]
        assert service["environment"][CONFIG_VARIABLE] == "/etc/halfmoon.yaml"
    entries = re.findall(r'^ENTRYPOINT \["python", "-m", "halfmoon.up.service", "(\w+)"', dockerfile(), re.MULTILINE)
    assert set(entries) == set(SERVICES)
    assert dockerfile().count("\nENTRYPOINT") == len(SERVICES)


def test_each_role_gets_its_own_credential_and_no_other() -> None:
    """The one service with all of them listens nowhere, and is done before any other starts."""
    services = compose()
    secret = services.pop("secret")
    made = {place: volume for volume, place in (one.split(":") for one in secret["volumes"])}
    assert set(made) == {f"/secrets/{name}" for name in (*ROLES.values(), "root")}
    assert secret["network_mode"] == "none"
    for name, service in services.items():
        mounted = [one for one in service["volumes"] if one.startswith("secret-")]
        assert mounted == [f"{made[f'/secrets/{ROLES[name]}']}:/run/halfmoon:ro"]
        assert service["environment"][FILE_VARIABLE] == f"/run/halfmoon/{CREDENTIAL_FILE}"
        assert [service["environment"][variable] for variable in TLS_VARIABLES] == [*map(str, paths_in(MOUNTED))]
        assert service["depends_on"]["secret"] == {"condition": "service_completed_successfully"}
        assert f"/secrets/{ROLES[name]}" in dockerfile()


def test_images_without_torch_lack_nothing_that_they_import() -> None:
    lacking = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'gguf')))"
    theirs = [name for name in SERVICES if "FROM service AS " + name + "\n" in dockerfile()]
    assert theirs == ["gateway", "kvstore", "console"]
    run = ", ".join("console.__main__" if name == "console" else f"services.{name}.__main__" for name in theirs)
    program = f"{lacking}; import {run}, services.gateway.service, halfmoon.cli.app, halfmoon.rpc.health_probe"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_containers_may_write_to_their_volumes_alone() -> None:
    for name, service in {**compose(), **compose_gpu()}.items():
        assert service["read_only"], name
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize(("file", "compilers"), [("Dockerfile", 2), ("deploy/vllm/Dockerfile", 3)])
def test_what_is_compiled_can_be_written_and_loaded(file: str, compilers: int) -> None:
    """In a home directory it cannot be written; in `/tmp`, which Docker mounts noexec, it cannot be loaded."""
    text = (ROOT / file).read_text()
    places = dict(re.findall(r"\b((?:TRITON|TORCHINDUCTOR|VLLM)_CACHE_(?:DIR|ROOT))=(\S+)", text))
    assert len(places) == compilers
    assert all(Path(place).is_relative_to("/cache") for place in places.values())


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/vllm/Dockerfile"])
def test_a_new_volume_for_state_is_private_from_the_start(file: str) -> None:
    """A volume takes its mode from the image; services would mend another one, and warn of it."""
    (private,) = re.findall(r"install -d -m 0700 -o halfmoon -g halfmoon ((?:[^&\\]|\\\n)+)", (ROOT / file).read_text())
    assert "/state" in private.split()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_what_services_keep_is_in_volumes_with_a_name(name: str) -> None:
    """Calibrations are a worker's: those of one host share them, and measure themselves one after the other."""
    service = compose()[name]
    places = [one.split(":")[1] for one in service["volumes"] if not one.endswith(":ro")]
    kept = [field for field in ("state_dir", "disk_dir") if field in SETTINGS[name].model_fields]
    assert kept
    for field in kept:
        directory = Path(options(service)[field.replace("_", "-")])
        assert any(directory.is_relative_to(place) for place in places)


def test_workers_are_dialled_at_addresses_of_their_own() -> None:
    for name in ("prefill", "decode"):
        own = options(compose()[name])
        assert "advertise" not in own
        assert own["listen"].startswith("0.0.0.0:")
        assert "ports" not in compose()[name]


def test_workers_of_the_profile_gpu_are_the_others_with_a_gpu_each() -> None:
    found = compose_gpu()
    assert found.keys() == {"prefill-gpu", "decode-gpu"}
    for name, service in found.items():
        other = compose()[name.removesuffix("-gpu")]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert service["image"] == f"{other['image']}:cuda"
        assert service["build"]["target"] == other["build"]["target"]
        assert service["build"]["args"]["TORCH_BACKEND"] == "${HALFMOON_CUDA_BACKEND:-cu128}"
        assert service["networks"]["default"]["aliases"] == [name.removesuffix("-gpu")]  # where Prometheus looks
        own = {"build", "image", "scale", "networks", "deploy", "profiles"}
        assert {key: value for key, value in service.items() if key not in own} == {
            key: value for key, value in other.items() if key not in own
        }


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("overlay", [(), ("-f", "docker-compose.yml", "-f", "deploy/vllm/compose.yml")])
def test_docker_compose_takes_the_profiles(overlay: Sequence[str]) -> None:
    for profile, services in (("gpu", {"prefill-gpu", "decode-gpu"}), ("monitoring", {"prometheus", "grafana"})):
        environment = {**os.environ, "HALFMOON_CPU_WORKERS": "0"}
        command = ["docker-compose", *overlay, "--profile", profile, "config"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        found = yaml.safe_load(done.stdout)["services"]
        assert services <= found.keys()
        assert found["decode"]["scale"] == found["prefill"]["scale"] == 0
        reserved = {name for name, service in found.items() if "devices" in str(service.get("deploy"))}
        assert reserved <= {"prefill-gpu", "decode-gpu"}  # some releases leave out what is of other profiles
        assert profile != "gpu" or reserved == services


def test_the_services_share_the_ledger_that_is_started() -> None:
    """The password is not in the URL, where `@` and `%` would mean something else."""
    ledger = compose_others()["ledger"]["environment"]
    url = "postgresql://{POSTGRES_USER}@ledger/{POSTGRES_DB}".format(**ledger)
    for name in ("gateway", "planner"):
        service = compose()[name]
        assert service["environment"][f"HALFMOON_{name.upper()}_LEDGER_URL"] == url
        assert service["environment"]["PGPASSWORD"] == ledger["POSTGRES_PASSWORD"]
        assert service["depends_on"]["ledger"] == {"condition": "service_healthy"}
        assert service["build"]["args"]["EXTRAS"] == "postgresql"


def test_monitoring_mounts_files_that_there_are() -> None:
    others = compose_others()
    assert {name for name, service in others.items() if service.get("profiles") == ["monitoring"]} == {
        "prometheus",
        "grafana",
    }
    mounts = [one for name in ("prometheus", "grafana") for one in others[name]["volumes"] if one.startswith("./")]
    for mount in mounts:
        assert (ROOT / mount.split(":")[0]).exists()
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"


def test_the_variables_are_documented() -> None:
    show = "import scripts.env_example as one; print(one.env_example(), end='')"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, cwd=ROOT)
    written = (ROOT / "deploy" / "env.example").read_text()
    assert done.stdout == written, "run `python -m scripts.env_example`"


def test_the_file_that_holds_their_secrets_is_not_committed() -> None:
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()
