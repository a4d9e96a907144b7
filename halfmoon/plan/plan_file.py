"""plan.yaml: the layout that was chosen, as a cluster file with a model, which `halfmoon up --plan` starts from.

model: llama-3-8b
layout: 2 prefill TP1 + 1 decode TP2
handover_codec: raw
gateway: {conditional_disaggregation: auto, max_prefill_degree: 4}, as far as they are not the defaults
expected: {rate_per_s: 10.0, attainment: 0.93, goodput_per_s: 11.2}
cluster: what `halfmoon simulate --cluster` takes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from halfmoon.errors import InvalidRequest
from halfmoon.plan.layout import Layout, WorkerSet
from halfmoon.plan.layout_trial import layer_passes, layout_network, workers_per_node
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.objective import Rated
from halfmoon.policy.placement.conditional import DEFAULT_MODE, ConditionalMode
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import Batching
from halfmoon.sim.cluster.kv_codecs import KvCodecName
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile
from halfmoon.sim.latency_sources.sequence_parallel import long_prompt_tokens, parallel_model
from halfmoon.yaml_text import parsed_yaml


class PlannedWorkers(BaseModel):
    """Equal workers. "5" is not 5, true is not 1."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    role: Role
    count: int = Field(default=1, ge=0, le=4096)
    gpu: str | None = None
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    sp: int = Field(default=1, ge=1)
    long_prompt_tokens: int | None = Field(default=None, ge=1)
    offload_bytes: int = Field(default=0, ge=0)  # host memory for KV of one worker
    offload_weights: float = Field(default=0.0, ge=0, le=1)  # share of the layers whose weights are on the host
    max_batch_tokens: int | None = Field(default=None, ge=1)
    chunk_tokens: int | None = Field(default=None, ge=1)
    max_running: int | None = Field(default=None, ge=1)
    batching: Batching = "chunked"
    first_node: int | None = Field(default=None, ge=0)  # of a paired unit, whose workers share a node

    @field_validator("batching")
    @classmethod
    def _check_batching(cls, batching: Batching) -> Batching:
        """Workers know one rule; the other one is simulated for comparisons."""
        if batching != "chunked":
            raise ValueError(f"no worker batches {batching}: it is simulated only, so plan with chunked")
        return batching

    @property
    def num_devices(self) -> int:
        """Devices of one worker."""
        return self.tp * self.pp * self.sp

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command-line options of such a worker."""
        named = {
            "--tensor-parallel": self.tp,
            "--pipeline-parallel": self.pp,
            "--sequence-parallel": None if self.sp == 1 else self.sp,
            "--long-prompt-tokens": self.long_prompt_tokens,
            "--max-batch-tokens": self.max_batch_tokens,
            "--chunk-tokens": self.chunk_tokens,
            "--max-running": self.max_running,
            "--offload-weights": self.offload_weights or None,
            **(_host_options(self.offload_bytes) if self.offload_bytes else {}),
        }
        return tuple(part for name, value in named.items() if value is not None for part in (name, str(value)))


def _host_options(offload_bytes: int) -> dict[str, str]:
    """The simulator has all sequences in one pass of a step."""
    return {"--offload-kv": "host", "--offload-bytes": str(offload_bytes), "--offload-schedule": "throughput"}


class PlannedLayout(BaseModel):
    """The workers of a plan; what else a simulator wants to know of them is not read."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    workers: tuple[PlannedWorkers, ...] = Field(min_length=1)
    kv_policy: str | None = None  # of the requests; `SystemConfig` gives it to classes

    def of_role(self, role: Role) -> list[PlannedWorkers]:
        """One entry for each worker of a role."""
        return [group for group in self.workers if group.role == role for _ in range(group.count)]


class PlannedGateway(BaseModel):
    """The settings of the gateway that a plan counts on."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    conditional_disaggregation: ConditionalMode = DEFAULT_MODE
    max_prefill_degree: int = Field(default=1, ge=1)


class PlannedCluster(BaseModel):
    """The part of a plan's file that decides which workers are started."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_name: str = Field(alias="model")
    handover_codec: KvCodecName = "raw"
    gateway: PlannedGateway = PlannedGateway()
    cluster: PlannedLayout


def parse_plan(text: str, path: Path) -> PlannedCluster:
    """Parses a plan. Raises InvalidRequest for any other text."""
    try:
        return PlannedCluster.model_validate(parsed_yaml(text).value)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the plan {path} cannot be read: {error}", param="plan") from error
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])) or "the top"
        raise InvalidRequest(
            f"{path} is not a plan: {at}: {first['msg']}; `halfmoon plan` writes one", param="plan"
        ) from error


def plan_text(problem: PlanningProblem, model: str, latencies: Mapping[str, str], best: Rated) -> str:
    """The file's text. `latencies` holds the latency source of each GPU."""
    targets, layout, expected = problem.goal.targets, best.layout, best.evaluation
    counted_on = PlannedGateway(
        conditional_disaggregation=problem.conditional, max_prefill_degree=layout.prefill_degree
    ).model_dump(exclude_defaults=True)
    result = {
        "model": model,
        "layout": problem.text(layout),
        "handover_codec": layout.codec,
        **({"gateway": counted_on} if counted_on else {}),
        "expected": {
            "rate_per_s": round(expected.rate_per_s, 4),
            "attainment": round(expected.attainment.value(problem.goal.criterion), 4),
            "goodput_per_s": round(best.goodput_per_s, 4),
            "gpus": layout.num_gpus,
            "price_per_hour": round(best.price_per_hour, 2),
        },
        "cluster": {
            "workers": [
                {**_worker(problem, layout, workers, unit), "latency": latencies[workers.kind.gpu]}
                for unit in range(layout.num_units)
                for workers in layout.sets
            ],
            "network": asdict(layout_network(problem, layout)),
            "targets": asdict(targets),
            **counted_on,
            **({} if problem.kv_policy is None else {"kv_policy": problem.kv_policy}),
        },
    }
    text: str = yaml.safe_dump(result, sort_keys=False)
    return text


def _worker(problem: PlanningProblem, layout: Layout, workers: WorkerSet, unit: int) -> dict[str, Any]:
    is_measured = isinstance(problem.sources[workers.kind.gpu], MeasuredProfile)
    limits = asdict(problem.rules.limits[workers.role])
    del limits["follows_targets"]  # a plan names the length of chunks
    del limits["nests_steps"]  # a profile says what its workers do
    return {
        "role": workers.role,
        "count": workers.num,
        **({} if is_measured else {"gpu": workers.kind.gpu}),
        "tp": workers.kind.parallelism.tensor,
        "pp": workers.kind.parallelism.pipeline,
        **_sequence(problem, workers),
        **({"offload_bytes": workers.kind.host.kv_bytes} if workers.kind.host.kv_bytes else {}),
        **({"offload_weights": workers.kind.host.weights} if workers.kind.host.weights else {}),
        **limits,
        **({"layer_passes": passes} if (passes := layer_passes(workers.role, layout.prefill_degree)) else {}),
        "workers_per_node": workers_per_node(layout, workers, problem.fleet),
        **({"first_node": unit} if layout.is_paired else {}),
    }


def _sequence(problem: PlanningProblem, workers: WorkerSet) -> dict[str, int]:
    """The devices that share long prompts, and from which length on that pays."""
    gpu, parallelism = workers.kind.gpu, workers.kind.parallelism
    if parallelism.sequence == 1:
        return {}
    most_tokens = long_prompt_tokens(parallel_model(problem.sources[gpu], gpu, *parallelism))
    return {"sp": parallelism.sequence, **({} if most_tokens is None else {"long_prompt_tokens": most_tokens})}
