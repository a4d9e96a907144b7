"""docs/guide/kubernetes.md: the commands that make Secrets make those that pods mount."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from halfmoon.rpc.credentials.issue import CREDENTIAL_FILE
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, paths_in, read_identity
from tests.deploy.deployments import ROLES, ROOT
from tests.deploy.manifests import environment, needs_kubectl, pods

# Nothing answers `kubectl apply` here: what it would send is kept. Everything else is the real kubectl.
KUBECTL = """#!/bin/bash
if [[ $1 == apply ]]; then cat "${@: -1}" >> applied.yaml; echo --- >> applied.yaml; else exec {kubectl} "$@"; fi
"""


def guide() -> str:
    return (ROOT / "docs" / "guide" / "kubernetes.md").read_text()


def applied_by_the_guide(directory: Path) -> dict[str, dict[str, bytes]]:
    """Runs the commands of the page's section Secrets. Returns each Secret's files."""
    (commands,) = re.findall(r"^## Secrets\n.*?```sh\n(.*?)```", guide(), re.MULTILINE | re.DOTALL)
    programs = directory / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "kubectl").write_text(KUBECTL.replace("{kubectl}", str(shutil.which("kubectl"))))
    (programs / "halfmoon").write_text(f'#!/bin/sh\nexec {sys.executable} -m halfmoon.cli.app "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (directory / "deploy").unlink(missing_ok=True)
    (directory / "deploy").symlink_to(ROOT / "deploy")
    (directory / "applied.yaml").unlink(missing_ok=True)
    path = f"{programs}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=directory, env=variables, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    objects = [found for found in yaml.safe_load_all((directory / "applied.yaml").read_text()) if found]
    assert {found["metadata"].get("namespace", found["metadata"]["name"]) for found in objects} == {"halfmoon"}
    return {
        found["metadata"]["name"]: {key: base64.b64decode(text) for key, text in found["data"].items()}
        for found in objects
        if found["kind"] == "Secret"
    }


@needs_kubectl
def test_the_guides_commands_make_what_pods_mount(tmp_path: Path) -> None:
    secrets = applied_by_the_guide(tmp_path)
    used = set()
    for name, pod in pods("cpu").items():
        role: ClusterRole = ROLES[name]  # type: ignore[assignment]
        files = secrets[f"halfmoon-{role}"]
        used |= {f"halfmoon-{role}", "halfmoon-access"}
        assert {Path(environment(pod)[variable]).name for variable in TLS_VARIABLES} | {CREDENTIAL_FILE} == files.keys()
        mounted = tmp_path / name
        mounted.mkdir()
        for file, content in files.items():
            (mounted / file).write_bytes(content)
        assert read_identity(paths_in(mounted), role).role == role
        credential = own_credential(role, {"HALFMOON_CLUSTER_SECRET_FILE": str(mounted / CREDENTIAL_FILE)})
        assert credential is not None
        assert credential.tokens
        references = [value["secretKeyRef"] for value in environment(pod).values() if "secretKeyRef" in value]
        for volume in pod["volumes"]:
            references += volume.get("secret", {}).get("items", [])
        needed = {reference["key"] for reference in references if not reference.get("optional")}
        assert needed <= secrets["halfmoon-access"].keys()
    assert set(secrets) == used  # nothing of secrets/root among them
    assert all(content == content.strip() for content in secrets["halfmoon-access"].values())


@needs_kubectl
def test_a_second_run_renews_certificates_and_keeps_secrets(tmp_path: Path) -> None:
    first, second = applied_by_the_guide(tmp_path), applied_by_the_guide(tmp_path)
    assert first["halfmoon-access"] == second["halfmoon-access"]
    for name in first.keys() - {"halfmoon-access"}:
        changed = {file for file in first[name] if first[name][file] != second[name][file]}
        assert changed == {"tls.crt", "tls.key"}
