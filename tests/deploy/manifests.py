"""The objects of deploy/kubernetes, as they are written and as `kubectl kustomize` renders them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.deployments import ROLES, ROOT, Document

KUBERNETES = ROOT / "deploy" / "kubernetes"
NAME = "app.kubernetes.io/name"

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
each_overlay = pytest.mark.parametrize("overlay", ["cpu", "gpu", "many"])


def written(directory: Path) -> Iterator[Document]:
    """The objects in the files that a kustomization names as resources, as they are written."""
    for name in yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]:
        if (directory / name).is_dir():
            yield from written(directory / name)
        else:
            yield from yaml.safe_load_all((directory / name).read_text())


@cache
def rendered(overlay: str) -> list[Document]:
    """The objects that `kubectl apply -k` would send."""
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES / overlay)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: Iterable[Document], kind: str) -> dict[str, Document]:
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def pods(overlay: str) -> dict[str, Document]:
    deployments = of_kind(rendered(overlay), "Deployment")
    return {name: deployment["spec"]["template"]["spec"] for name, deployment in deployments.items()}


def container(pod: Document) -> Document:
    (only,) = pod["containers"]
    return dict(only)


def environment(pod: Document) -> dict[str, Any]:
    """Values of variables; of those from elsewhere, where that is."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(pod)["env"]}


def ports(pod: Document) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(pod)["ports"]}


def selected(selector: Document) -> set[str]:
    """The workloads that a selector by name means."""
    names = {selector["matchLabels"][NAME]} if "matchLabels" in selector else set(ROLES)
    for expression in selector.get("matchExpressions", ()):
        assert (expression["key"], expression["operator"]) == (NAME, "In")
        names &= set(expression["values"])
    return names
