"""docker-compose.yml, the Dockerfile and Prometheus agree on services, ports and the configuration file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from halfmoon.rpc.credentials.issue import CREDENTIAL_FILE
from halfmoon.rpc.credentials.sources import FILE_VARIABLE
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, paths_in
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.metrics_targets import TARGETS_FILE
from halfmoon.up.service import CONFIG_VARIABLE, SERVICES
from tests.deploy.deployments import ROLES, ROOT, SETTINGS, compose, compose_others, dockerfile, options

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


def test_what_knows_no_model_starts_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import services.kvstore.__main__, console.__main__"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_workers_are_dialled_at_addresses_of_their_own() -> None:
    for name in ("prefill", "decode"):
        own = options(compose()[name])
        assert "advertise" not in own
        assert own["listen"].startswith("0.0.0.0:")
        assert "ports" not in compose()[name]


def test_the_services_share_the_ledger_that_is_started() -> None:
    ledger = compose_others()["ledger"]["environment"]
    url = "postgresql://{POSTGRES_USER}:{POSTGRES_PASSWORD}@ledger/{POSTGRES_DB}".format(**ledger)
    for name in ("gateway", "planner"):
        service = compose()[name]
        assert service["environment"][f"HALFMOON_{name.upper()}_LEDGER_URL"] == url
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
