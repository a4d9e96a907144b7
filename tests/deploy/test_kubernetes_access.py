"""deploy/kubernetes: which secrets a pod gets, what it may do on its host, and who reaches it."""

from __future__ import annotations

import re
from pathlib import Path

from halfmoon.rpc.credentials.issue import CREDENTIAL_FILE
from halfmoon.rpc.credentials.roles import CALLERS
from halfmoon.rpc.credentials.sources import FILE_VARIABLE
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, paths_in
from tests.deploy.deployments import ROLES, dockerfile
from tests.deploy.manifests import (
    container,
    each_overlay,
    environment,
    needs_kubectl,
    of_kind,
    pods,
    rendered,
    selected,
)

CREDENTIALS = Path("/run/halfmoon")
ACCESS = Path("/run/access")
SERVED = {  # gRPC services at the port called grpc
    "gateway": ("Cluster",),
    "prefill": ("Prefill", "Decode", "KVTransfer"),
    "decode": ("Prefill", "Decode", "KVTransfer"),
    "kvstore": ("KVStore", "KVStoreBytes", "KVStoreAdmin"),
    "planner": ("Planner",),
}
ACCESS_KEYS = {  # of the Secret halfmoon-access
    "gateway": {"api_key", "operator_token", "ledger_url", "hf_token"},
    "planner": {"operator_token", "ledger_url", "hf_token"},
    "console": {"api_key", "operator_token"},
    "prefill": {"hf_token"},
    "decode": {"hf_token"},
    "kvstore": set(),
}


@needs_kubectl
@each_overlay
def test_each_pod_mounts_its_own_roles_credential_and_no_other(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        mounts = {mount["name"]: mount for mount in container(pod)["volumeMounts"]}
        secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
        assert mounts["credentials"]["mountPath"] == str(CREDENTIALS)
        assert secrets.pop("credentials") == {"secretName": f"halfmoon-{ROLES[name]}", "defaultMode": 0o440}
        assert Path(environment(pod)[FILE_VARIABLE]) == CREDENTIALS / CREDENTIAL_FILE
        assert [environment(pod)[variable] for variable in TLS_VARIABLES] == [*map(str, paths_in(CREDENTIALS))]
        assert "envFrom" not in container(pod)
        references = [value["secretKeyRef"] for value in environment(pod).values() if "secretKeyRef" in value]
        for secret in secrets.values():
            references += [{"name": secret["secretName"], "key": item["key"]} for item in secret["items"]]
        assert {reference["name"] for reference in references} <= {"halfmoon-access"}
        assert {reference["key"] for reference in references} == ACCESS_KEYS[name]
        optional = {reference["key"] for reference in references if reference.get("optional")}
        assert optional == ACCESS_KEYS[name] & ({"hf_token"} if overlay == "many" else {"ledger_url", "hf_token"})
        for variable, value in environment(pod).items():
            if variable.endswith("_FILE") and variable != FILE_VARIABLE:
                assert Path(value).parent == ACCESS == Path(mounts["access"]["mountPath"])
                assert Path(value).name in {item["path"] for item in secrets["access"]["items"]}


@needs_kubectl
@each_overlay
def test_pods_are_restricted(overlay: str) -> None:
    """As the Pod Security Standard `restricted` wants, which the namespace enforces, and with a read-only root."""
    namespace = of_kind(rendered(overlay), "Namespace")["halfmoon"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (user,) = re.findall(r"useradd --uid (\d+)", dockerfile())
    (directories,) = re.findall(r"^VOLUME \[(.*)\]$", dockerfile(), re.MULTILINE)
    for pod in pods(overlay).values():
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert {security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
        assert security["fsGroupChangePolicy"] == "OnRootMismatch"  # what is 0700 in a claim stays so
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        kinds = {next(kind for kind in volume if kind != "name") for volume in pod["volumes"]}
        assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        writable = {mount["mountPath"] for mount in container(pod)["volumeMounts"] if not mount.get("readOnly")}
        assert writable - {"/dev/shm"} == {"/tmp", *re.findall(r'"([^"]+)"', directories)}
        assert environment(pod)["HOME"] in writable


@needs_kubectl
@each_overlay
def test_callers_are_those_whose_role_may_call(overlay: str) -> None:
    """The network lets each workload reach what the table of roles lets it call, and outsiders HTTP alone."""
    reachable: dict[tuple[str, str], set[str]] = {}
    for policy in of_kind(rendered(overlay), "NetworkPolicy").values():
        spec = policy["spec"]
        assert "Ingress" in spec.get("policyTypes", ["Ingress"])
        for rule in spec.get("ingress", ()):
            senders = {"anybody"} if "from" not in rule else set()
            for sender in rule.get("from", ()):
                assert set(sender) == {"podSelector"}
                senders |= selected(sender["podSelector"])
            for target in selected(spec["podSelector"]):
                for port in rule["ports"]:
                    reachable.setdefault((target, port["port"]), set()).update(senders)
    assert of_kind(rendered(overlay), "NetworkPolicy")["nobody"]["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
    }
    assert {place for place, senders in reachable.items() if "anybody" in senders} == {
        ("gateway", "http"),
        ("console", "http"),
    }
    for name, served in SERVED.items():
        methods = [method for method in CALLERS if method.split("/")[1].removeprefix("halfmoon.") in served]
        roles = {role for method in methods for role in CALLERS[method]}
        assert reachable[name, "grpc"] == {workload for workload, role in ROLES.items() if role in roles}
