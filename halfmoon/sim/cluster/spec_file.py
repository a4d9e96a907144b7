"""A cluster from a YAML or JSON file.

latency: roofline:llama-3-8b        # what `--latency` may say; a group may have its own
workers:
  - {role: prefill, count: 2, gpu: h100, tp: 2}
  - {role: decode, count: 1, gpu: h200, max_running: 256}
network: {bytes_per_s: 50e9, handover: push}
placement: kvcache-centric
targets: {ttft_s: 0.5, tpot_s: 0.05}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.conditional import DEFAULT_MODE, ConditionalMode
from halfmoon.policy.placement.device_rules import DeviceRule
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import (
    Batching,
    BatchLimits,
    ClusterSpec,
    Failure,
    Network,
    SloTargets,
    Stores,
    WorkerGroup,
)
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.latency_sources.hardware import DEVICES
from halfmoon.sim.latency_sources.host_workers import HostShare, worker_model
from halfmoon.sim.latency_sources.latency_model import LatencyModel, LatencySource
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile
from halfmoon.yaml_text import parsed_yaml

_LIMITS = BatchLimits(follows_targets=True)  # as workers without --chunk-tokens
_MOST_KV = 10**15  # tokens or bytes of a worker
_MOST_WORKERS = 100_000  # of a group; each worker takes some kilobytes before the simulation starts
_Kind = TypeVar("_Kind")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Workers(_Strict):
    role: Role
    count: int = Field(default=1, ge=0, le=_MOST_WORKERS)
    gpu: str | None = None
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    sp: int = Field(default=1, ge=1, le=_MOST_WORKERS)
    long_prompt_tokens: int | None = Field(default=None, ge=1)  # of real workers; simulated ones share what is sooner
    offload_bytes: int = Field(default=0, ge=0, le=_MOST_KV)  # host memory for KV of one worker
    offload_weights: float = Field(default=0.0, ge=0, le=1)  # share of the layers whose weights are on the host
    latency: str | None = None
    kv_tokens: int | None = Field(default=None, ge=1, le=_MOST_KV)
    prefix_cache: bool = True
    layer_passes: int = Field(default=0, ge=0)
    device: str = ""
    max_batch_tokens: int | None = None  # None, here and below: the profile's value, else the default
    chunk_tokens: int | None = None
    max_running: int | None = None
    batching: Batching = _LIMITS.batching
    nests_steps: bool | None = None  # None: as the profile says, else not
    workers_per_node: int | None = None
    first_node: int | None = Field(default=None, ge=0, le=_MOST_WORKERS)
    price_per_hour: float | None = None  # of one worker; None: the catalogue's price of its devices


class _Cluster(_Strict):
    workers: tuple[dict[str, Any], ...] = Field(min_length=1)
    latency: str | None = None
    network: dict[str, Any] = {}
    contention: dict[str, Any] = {}
    request_s: float | None = None
    answer_s: float | None = None
    placement: PlacementMode = "kvcache-centric"
    balancing_threshold: float = Field(default=2.0, ge=1)
    admission: AdmissionMode = "off"
    targets: dict[str, Any] = {}
    block_tokens: int = 64
    report_s: float = 1.0
    failures: tuple[dict[str, Any], ...] = ()
    conditional_disaggregation: ConditionalMode = DEFAULT_MODE
    prefill_devices: tuple[str, ...] = ()
    hot_spots: bool = False
    max_prefill_degree: int = Field(default=1, ge=1)
    stores: dict[str, Any] = {}
    kv_policy: str | None = None

    @field_validator("admission", "conditional_disaggregation", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads off as False


def read_cluster(
    path: Path, latency: str | None = None, source_of: Callable[[str], LatencySource] = latency_source
) -> ClusterSpec:
    """Reads a cluster; `latency` overrides the file's sources.

    `source_of` finds a latency source by its name; a command with a ledger also knows the sources in it.

    Raises InvalidRequest, which names the wrong or missing field.
    """
    try:
        document = parsed_yaml(path.read_text()).value
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"the cluster {path} cannot be read: {error}", param="cluster") from error
    read = _validated(path, _Cluster, document)
    sources: dict[str, LatencySource] = {}
    network, contention = read.network, read.contention
    request_s, answer_s = read.request_s, read.answer_s
    groups = []
    for number, written in enumerate(read.workers):
        worker = _validated(path, _Workers, written, f"workers.{number}")
        text = latency or worker.latency or read.latency
        if text is None:
            raise InvalidRequest(
                f"the cluster {path} does not say how fast its workers are: give --latency, or `latency:` in the file",
                param="latency",
            )
        source = sources.get(text) or sources.setdefault(text, source_of(text))
        limits = _LIMITS
        if isinstance(source, MeasuredProfile):
            network = {**source.network, **network}
            contention = {**source.contention, **contention}
            request_s = source.request_s if request_s is None else request_s
            answer_s = source.answer_s if answer_s is None else answer_s
            limits = source.batch_limits
        parallelism = worker.tp, worker.pp, worker.sp
        host = HostShare(worker.offload_bytes, worker.offload_weights)
        groups.append(_group(worker, worker_model(source, worker.gpu, *parallelism, host), limits))
    return ClusterSpec(
        tuple(groups),
        _validated(path, Network, network, "network"),
        read.placement,
        read.balancing_threshold,
        read.admission,
        _validated(path, SloTargets, read.targets, "targets"),
        read.block_tokens,
        read.report_s,
        tuple(_validated(path, Failure, failure, "failures") for failure in read.failures),
        _validated(path, Contention, contention, "contention"),
        request_s or 0.0,
        answer_s or 0.0,
        read.conditional_disaggregation,
        _validated(path, Stores, read.stores, "stores"),
        tuple(map(DeviceRule.parse, read.prefill_devices)),
        read.hot_spots,
        read.max_prefill_degree,
        kv_policy=read.kv_policy,
    )


def _group(workers: _Workers, model: LatencyModel, limits: BatchLimits) -> WorkerGroup:
    """Builds a group; `limits` are the defaults for what the file omits."""
    named = "max_batch_tokens", "chunk_tokens", "max_running", "nests_steps"
    given = {name: getattr(workers, name) for name in named}
    price = workers.price_per_hour
    if price is None:
        price = (
            DEVICES[workers.gpu].price_per_hour * model.num_devices if workers.gpu and workers.gpu in DEVICES else 0.0
        )
    given = {name: value for name, value in given.items() if value is not None}
    follows_targets = limits.follows_targets and workers.chunk_tokens is None
    return WorkerGroup(
        workers.role,
        workers.count,
        model,
        replace(limits, batching=workers.batching, **given, follows_targets=follows_targets),
        workers.prefix_cache,
        workers.kv_tokens,
        workers.workers_per_node,
        workers.first_node,
        price,
        workers.layer_passes,
        workers.device,
    )


def _validated(path: Path, kind: type[_Kind], value: Any, where: str = "") -> _Kind:
    try:
        known = set(TypeAdapter(kind).json_schema().get("properties", ()))
        unknown = sorted(set(value) - known) if isinstance(value, dict) else []
        if unknown:
            what = f"unknown {where or 'field'} {unknown[0]!r}: known are {', '.join(sorted(known))}"
            raise InvalidRequest(f"the cluster {path} has an {what}", param="cluster")
        read = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(path, where, *first["loc"], problem=first["msg"]) from error
    for name, written in value.items():
        if isinstance(written, bool) and type(getattr(read, name)) in (int, float):
            raise _wrong(path, where, name, problem=f"must be a number, not {str(written).lower()}")
    return read


def _wrong(path: Path, *place: int | str, problem: str) -> InvalidRequest:
    at = ".".join(str(part) for part in place if part != "") or "the top"
    return InvalidRequest(f"the cluster {path} is wrong at {at}: {problem}", param="cluster")
