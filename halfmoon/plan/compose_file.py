"""A plan's workers for Docker Compose: an overlay of docker-compose.yml that replaces its workers.

docker-compose -f docker-compose.yml -f plan.compose.yml up --build
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from halfmoon.plan.plan_file import PlannedCluster, PlannedWorkers

_BASE = "docker-compose.yml"
_PORTS = {"prefill": 7001, "decode": 7002}  # where the images' health checks ask
_METRICS_PORT = 9100
_CPU = {"TORCH_BACKEND": "${TORCH_BACKEND-cpu}", "EXTRAS": "postgresql"}
_CUDA = {"TORCH_BACKEND": "${HALFMOON_CUDA_BACKEND:-cu128}", "EXTRAS": "gpu"}
_DRAIN_S = 10  # Compose stops the workers before the gateway, on which they depend


def compose_text(planned: PlannedCluster) -> str:
    """One service per worker, each with its own GPUs. The model is HALFMOON_MODEL, or else the plan's."""
    services: dict[str, Any] = {name: {"profiles": ["not-planned"]} for name in ("prefill", "decode")}
    gateway: dict[str, str] = {}
    if planned.handover_codec != "raw":
        gateway["HALFMOON_GATEWAY_HANDOVER_CODEC"] = planned.handover_codec
    for name, value in planned.gateway.model_dump(exclude_defaults=True).items():
        gateway[f"HALFMOON_GATEWAY_{name.upper()}"] = str(value)
    if gateway:
        services["gateway"] = {"environment": gateway}
    services |= dict(_workers(planned))
    header = (
        f"# Made by `halfmoon plan`: docker-compose -f {_BASE} -f THIS_FILE up --build, beside {_BASE}.\n"
        f"# Set HALFMOON_MODEL for the gateway, too: the plan is for {planned.model_name}.\n"
    )
    if planned.cluster.kv_policy is not None:
        header += f"# It counts on kv_policy {planned.cluster.kv_policy}: give that to the class of its requests.\n"
    text: str = yaml.safe_dump({"services": services}, sort_keys=False)
    return header + text


def _workers(planned: PlannedCluster) -> Iterator[tuple[str, dict[str, Any]]]:
    first_gpu = 0
    numbers = {"prefill": 0, "decode": 0, "both": 0}
    for kind in planned.cluster.workers:
        for _ in range(kind.count):
            name = f"{kind.role}-{numbers[kind.role]}"
            numbers[kind.role] += 1
            yield name, _service(name, kind, planned.model_name, first_gpu)
            first_gpu += kind.num_devices


def _service(name: str, kind: PlannedWorkers, model: str, first_gpu: int) -> dict[str, Any]:
    image = "decode" if kind.role == "decode" else "prefill"
    port, on_gpus = _PORTS[image], kind.gpu not in (None, "cpu")
    command = [
        f"--role={kind.role}",
        f"--listen=0.0.0.0:{port}",
        f"--advertise={name}:{port}",
        "--gateway=gateway:7000",
        "--kv-store=kvstore:7003",
        "--state-dir=/state",
        f"--model=${{HALFMOON_MODEL:-{model}}}",
        f"--metrics-port={_METRICS_PORT}",
        f"--drain-s={_DRAIN_S}",
        *kind.arguments,
    ]
    service = {
        "image": f"halfmoon/{image}:cuda" if on_gpus else f"halfmoon/{image}",
        "build": {"context": ".", "target": image, "args": dict(_CUDA if on_gpus else _CPU)},
        "init": True,
        "restart": "unless-stopped",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "logging": {"driver": "local"},
        "stop_grace_period": "30s",
        "command": command,
        "environment": {
            "HALFMOON_CONFIG": "/etc/halfmoon.yaml",
            "HALFMOON_CLUSTER_SECRET_FILE": "/run/halfmoon/credential",
            "HALFMOON_TLS_CERT": "/run/halfmoon/tls.crt",
            "HALFMOON_TLS_KEY": "/run/halfmoon/tls.key",
            "HALFMOON_TLS_CA": "/run/halfmoon/ca.crt",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "${OTEL_EXPORTER_OTLP_ENDPOINT:-}",
            "OTEL_TRACES_SAMPLER": "${OTEL_TRACES_SAMPLER:-parentbased_always_on}",
            "OTEL_TRACES_SAMPLER_ARG": "${OTEL_TRACES_SAMPLER_ARG:-1.0}",
            f"HALFMOON_{image.upper()}_QUANTIZATION": "${HALFMOON_QUANTIZATION:-}",
            f"HALFMOON_{image.upper()}_DEVICE": "${HALFMOON_DEVICE:-}",
            f"HALFMOON_{image.upper()}_HOST_NAME": "${HALFMOON_HOST_NAME:-docker}",
        },
        "volumes": [
            "models:/cache",
            "workers:/state",
            "secret-worker:/run/halfmoon:ro",
            "${HALFMOON_CONFIG:-./deploy/halfmoon.yaml}:/etc/halfmoon.yaml:ro",
        ],
        "networks": {"default": {"aliases": [image]}},  # where Prometheus looks
        "depends_on": {
            "secret": {"condition": "service_completed_successfully"},
            "gateway": {"condition": "service_started"},
        },
    }
    if not on_gpus:
        return service
    ids = [str(first_gpu + number) for number in range(kind.num_devices)]
    gpus = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
    return {**service, "deploy": {"resources": {"reservations": {"devices": gpus}}}}
