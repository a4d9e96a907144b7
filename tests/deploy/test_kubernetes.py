"""deploy/kubernetes: valid for the API, and in agreement with settings, the Dockerfile and docker-compose.yml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from halfmoon.rpc.credentials.sources import FILE_VARIABLE
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES
from halfmoon.up.config.read import read_config
from halfmoon.up.service import CONFIG_VARIABLE, SERVICES, service_start
from tests.deploy.deployments import ROLES, SETTINGS, compose, dockerfile, options
from tests.deploy.manifests import (
    KUBERNETES,
    NAME,
    container,
    each_overlay,
    environment,
    needs_kubectl,
    of_kind,
    pods,
    ports,
    rendered,
    written,
)

ELSEWHERE = ("advertise", "gateway", "drain-s")  # options that differ from those of Compose
VERSIONS = ("1.30", kubernetes_validate.latest_version())


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """Not for each object that is validated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_written_fits_the_schemas(overlay: str, version: str) -> None:
    for found in written(KUBERNETES / overlay):
        kubernetes_validate.validate(found, version, strict=True)


@needs_kubectl
@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_applied_fits_the_schemas(overlay: str, version: str) -> None:
    for found in rendered(overlay):
        kubernetes_validate.validate(found, version, strict=True)
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == "halfmoon"


@each_overlay
@pytest.mark.parametrize("service", SERVICES)
def test_each_service_takes_its_part_of_the_overlays_file(overlay: str, service: str) -> None:
    file = KUBERNETES / overlay / "halfmoon.yaml"
    start = service_start([service], {CONFIG_VARIABLE: str(file)})
    if service in ("prefill", "decode"):
        assert start.environment[f"HALFMOON_{service.upper()}_KV_TRANSPORTS"] == "grpc"  # pods share no memory


@needs_kubectl
@each_overlay
def test_pods_say_settings_that_there_are(overlay: str) -> None:
    found = pods(overlay)
    assert set(found) == set(SERVICES)
    for name, settings in SETTINGS.items():
        assert {option.replace("-", "_") for option in options(container(found[name]))} <= settings.model_fields.keys()
        prefix = f"HALFMOON_{name.upper()}_"
        variables = {variable for variable in environment(found[name]) if variable.startswith("HALFMOON_")}
        own = variables - {CONFIG_VARIABLE, FILE_VARIABLE, *TLS_VARIABLES}
        assert {variable.removeprefix(prefix).lower() for variable in own} <= settings.model_fields.keys()


@needs_kubectl
@each_overlay
def test_pods_and_compose_start_services_alike(overlay: str) -> None:
    """Only waiting at the end differs, where state lies, and the names at which services are dialled."""
    for name, pod in pods(overlay).items():
        here, there = options(container(pod)), options(compose()[name])
        if ROLES[name] != "worker":
            assert here.get("advertise") == there.get("advertise")
        assert here.items() >= {key: there[key] for key in there if key not in ELSEWHERE}.items()
        assert here.keys() - there.keys() <= {"state-dir", "drain-s", "processes", "advertise"}
        if ROLES[name] == "worker":
            assert here["advertise"].startswith("$(POD_IP):")
            assert environment(pod)[f"HALFMOON_{name.upper()}_HOST_NAME"] == {
                "fieldRef": {"fieldPath": "spec.nodeName"}
            }
            assert environment(pod)["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        files = {variable: Path(environment(pod)[variable]) for variable in (FILE_VARIABLE, *TLS_VARIABLES)}
        assert files == {variable: Path(compose()[name]["environment"][variable]) for variable in files}
        shared = {variable for variable in compose()[name]["environment"] if variable.startswith("HALFMOON_CONSOLE_")}
        assert shared <= environment(pod).keys()


@needs_kubectl
@each_overlay
def test_ports_match_from_the_argument_to_the_service_that_others_dial(overlay: str) -> None:
    services = of_kind(rendered(overlay), "Service")
    assert set(services) == {*SERVICES, "gateway-cluster"}
    assert services["gateway-cluster"]["spec"]["clusterIP"] == "None"
    for name, pod in pods(overlay).items():
        own = options(container(pod))
        opened = {
            "http": own.get("port"),
            "grpc": own.get("listen", own.get("cluster-listen", "")).rpartition(":")[2],
            "metrics": own.get("metrics-port"),
        }
        if name == "console":
            opened["http"] = re.findall(r'"--server.port", "(\d+)"', dockerfile(name))[0]
        assert ports(pod) == {port: int(number) for port, number in opened.items() if number}
        assert {*map(str, ports(pod).values())} == {
            *re.findall(r"\d+", dockerfile(name).split("EXPOSE")[1].split("\n")[0])
        }
        service = services[name]["spec"]
        assert service["selector"] == {NAME: name}
        assert {port["name"]: port["port"] for port in service["ports"]} == ports(pod)
        assert all(port["name"] == port["targetPort"] for port in service["ports"])
        assert service.get("type", "ClusterIP") == "ClusterIP"
        if ROLES[name] == "worker":
            assert service["clusterIP"] == "None"
        said = " ".join(filter(lambda value: isinstance(value, str), [*own.values(), *environment(pod).values()]))
        for peer, port in re.findall(r"\b([a-z][a-z0-9-]*):(\d+)", said):
            dialled = services[peer]["spec"]
            assert int(port) in {one["port"] for one in dialled["ports"]}
            assert int(port) in ports(pods(overlay)[dialled["selector"][NAME]]).values()


@needs_kubectl
@each_overlay
def test_health_is_asked_as_docker_does(overlay: str) -> None:
    """By the service's own certificate: a kubelet's gRPC probe speaks plain text."""
    for name, pod in pods(overlay).items():
        probes = [container(pod)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        asked = dockerfile(name).split("CMD [")[1].split("]")[0]
        for probe in probes:
            if name == "console":
                assert f":{ports(pod)[probe['httpGet']['port']]}{probe['httpGet']['path']}'" in asked
            else:
                assert probe["exec"]["command"] == re.findall(r'"([^"]+)"', asked)
                assert probe["timeoutSeconds"] > int(probe["exec"]["command"][1])


@needs_kubectl
@each_overlay
def test_a_pod_may_drain_before_it_is_killed(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        before = container(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        drain_s = float(options(container(pod)).get("drain-s", 0))
        assert before[0] == "sleep"
        assert grace_s >= int(before[1]) + drain_s + 15  # the end of a process on a busy host, too
        if name in ("gateway", "prefill", "decode"):
            assert drain_s >= float(options(compose()[name]).get("drain-s", 10))
        assert (name == "gateway") == (int(before[1]) > 0)  # clients are sent on meanwhile


@needs_kubectl
@each_overlay
def test_a_rollout_does_not_fail_while_a_pod_may_still_start(overlay: str) -> None:
    for name, deployment in of_kind(rendered(overlay), "Deployment").items():
        startup = container(pods(overlay)[name])["startupProbe"]
        most_s = startup["periodSeconds"] * startup["failureThreshold"]
        assert deployment["spec"]["progressDeadlineSeconds"] >= most_s + 120  # images are pulled before


def bytes_of(quantity: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(quantity if quantity.isdigit() else f"{quantity}B"))


@needs_kubectl
@each_overlay
def test_limits_have_room_for_what_the_file_configures(overlay: str) -> None:
    found, config = pods(overlay), read_config(KUBERNETES / overlay / "halfmoon.yaml")
    for pod in found.values():
        resources = container(pod)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert bytes_of(resources["requests"]["memory"]) <= bytes_of(resources["limits"]["memory"])
        assert "cpu" not in resources["limits"]
    store = container(found["kvstore"])["resources"]["limits"]
    assert bytes_of(store["memory"]) >= config.stores.dram_bytes + (512 << 20)
    assert bytes_of(store["ephemeral-storage"]) >= config.stores.disk_bytes + (1 << 30)
    for name in ("prefill", "decode"):
        limits = container(found[name])["resources"]["limits"]
        if overlay != "cpu":
            assert limits["nvidia.com/gpu"] == container(found[name])["resources"]["requests"]["nvidia.com/gpu"] == "1"
            assert config.workers.all.device == "cuda"
            assert container(found[name])["image"].endswith(":cuda")
        else:
            assert config.workers.all.kv_memory is not None
            assert bytes_of(limits["memory"]) >= config.workers.all.kv_memory + (2 << 30)


@needs_kubectl
@each_overlay
def test_nodes_can_be_drained_one_pod_of_a_workload_at_a_time(overlay: str) -> None:
    budgets = of_kind(rendered(overlay), "PodDisruptionBudget")
    assert set(budgets) == {"gateway", "prefill", "decode"}
    for name, budget in budgets.items():
        assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": {NAME: name}}}


@needs_kubectl
@pytest.mark.parametrize(("overlay", "mode"), [("gpu", "ReadWriteOnce"), ("many", "ReadWriteMany")])
def test_on_gpu_hosts_pods_share_weights_and_exchange_gpus(overlay: str, mode: str) -> None:
    claims = of_kind(rendered(overlay), "PersistentVolumeClaim")
    assert claims["models"]["spec"]["accessModes"] == [mode]
    for deployment in of_kind(rendered(overlay), "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        (cache,) = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
        assert cache["persistentVolumeClaim"]["claimName"] in claims
        assert pod["nodeSelector"] == {"halfmoon": "gpu-host"}
        if "nvidia.com/gpu" in container(pod)["resources"]["limits"]:
            assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@needs_kubectl
@each_overlay
def test_a_changed_file_starts_pods_anew(overlay: str) -> None:
    """Kustomize names the ConfigMap by its content."""
    ((name, config),) = of_kind(rendered(overlay), "ConfigMap").items()
    assert re.fullmatch(r"halfmoon-[a-z0-9]+", name)
    for pod in pods(overlay).values():
        (volume,) = [volume for volume in pod["volumes"] if "configMap" in volume]
        (mount,) = [mount for mount in container(pod)["volumeMounts"] if mount["name"] == volume["name"]]
        assert volume["configMap"]["name"] == name
        file = Path(environment(pod)[CONFIG_VARIABLE])
        assert (str(file.parent), {file.name}) == (mount["mountPath"], config["data"].keys())
        assert yaml.safe_load(config["data"][file.name])["model"]


@needs_kubectl
def test_workers_of_many_hosts_are_spread_and_scaled() -> None:
    deployments, scalers = of_kind(rendered("many"), "Deployment"), of_kind(rendered("many"), "HorizontalPodAutoscaler")
    rules = yaml.safe_load((KUBERNETES / "many" / "adapter.yaml").read_text())["rules"]["external"]
    assert scalers.keys() == {"prefill", "decode"}
    asked = []
    for name, scaler in scalers.items():
        spec, pod = scaler["spec"], pods("many")[name]
        assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) == ("Deployment", name)
        (down,) = spec["behavior"]["scaleDown"]["policies"]
        assert (down["type"], down["value"]) == ("Pods", 1)
        assert down["periodSeconds"] >= pod["terminationGracePeriodSeconds"]  # one drains at a time
        assert "replicas" not in deployments[name]["spec"]  # or each `kubectl apply` would set them back
        asked += [metric["external"]["metric"]["name"] for metric in spec["metrics"]]
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert sorted(asked) == sorted(rule["name"]["as"] for rule in rules)
    gateways = pods("many")["gateway"]  # several of them share a ledger
    assert environment(gateways)["HALFMOON_GATEWAY_NUM_GATEWAYS"] == str(deployments["gateway"]["spec"]["replicas"])
