"""The options of `halfmoon plan`, and the request that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from halfmoon.cli.profile_store import LedgerOptions, profile_file
from halfmoon.cli.simulate import Criterion, TbtOf
from halfmoon.errors import InvalidRequest
from halfmoon.plan.request import PlanRequest
from halfmoon.sim.latency_sources.hardware import DEVICES, device
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS


class Objective(StrEnum):
    """What the search minimizes (gpus, price) or maximizes (goodput per GPU or dollar)."""

    GPUS = "gpus"
    PRICE = "price"
    PER_GPU = "goodput-per-gpu"
    PER_DOLLAR = "goodput-per-dollar"


class Affinity(StrEnum):
    """high: KV may cross nodes. low: it stays within a node. auto: whichever is better."""

    AUTO = "auto"
    HIGH = "high"
    LOW = "low"


class KvCodecs(StrEnum):
    """Encodings of KV between nodes. auto tries them all where the network is slow."""

    AUTO = "auto"
    RAW = "raw"
    INT8 = "int8"
    INT4 = "int4"


class Conditional(StrEnum):
    """When decode workers compute prompts: see `halfmoon up --help`."""

    OFF = "off"
    FAILOVER = "failover"
    AUTO = "auto"
    STRICT = "strict"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The model and its requests."""

    PANEL: ClassVar[str] = "Model and workload"
    model: Annotated[
        str, typer.Option(help="A known name, a config.json or a Hugging Face id; with --latency any name.")
    ]
    workload: Annotated[str, typer.Option(help=f"A trace's path, or {'|'.join(KNOWN_LENGTHS)}|in=512,out=64.")]
    rate: Annotated[float | None, typer.Option(help="Requests per second that the layout has to sustain.")] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=2, help="Requests of one simulated pass; a trace gives its first. Default: 1000, or 4000 of a trace."
        ),
    ] = None
    context: Annotated[
        int | None, typer.Option(min=2, help="Longest sequence in tokens. Default: the model's context.")
    ] = None
    kv_policy: Annotated[
        str | None,
        typer.Option(
            help="KV that is kept of these requests, such as sinks:4+1024, snapkv:512+64 or h2o:512+512. Default: all."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The latency targets and how many requests must meet them."""

    PANEL: ClassVar[str] = "Targets"
    ttft: Annotated[
        float | None, typer.Option(help="Target for the time to first token, in seconds; the middle of a --map.")
    ] = None
    tpot: Annotated[
        float | None, typer.Option(help="Target for the mean time per output token, in seconds; the middle of a --map.")
    ] = None
    tbt: Annotated[float | None, typer.Option(help="Target for the gaps between tokens of a request, in seconds.")] = (
        None
    )
    tbt_of: Annotated[
        TbtOf, typer.Option(help="Gaps that --tbt applies to: the longest, or the mean of the longest tenth.")
    ] = TbtOf.LONGEST_TENTH
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet the targets.")] = 0.9
    criterion: Annotated[
        Criterion, typer.Option(help="joint: a request must meet all targets; marginal: each target counts by itself.")
    ] = Criterion.JOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """The fleet that the search may use, and its latencies."""

    PANEL: ClassVar[str] = "Hardware"
    gpu: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}; several kinds as h100:2x8,a100-80g:4x8.")]
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8
    prefill_gpu: Annotated[str | None, typer.Option(help="Kind of GPU for prefill workers.")] = None
    decode_gpu: Annotated[str | None, typer.Option(help="Kind of GPU for decode workers.")] = None
    network: Annotated[
        float | None, typer.Option(help="Network bandwidth of each node in Gbit/s. Default: the catalogue's.")
    ] = None
    price: Annotated[
        list[str] | None, typer.Option(help="GPU=DOLLARS per hour instead of the catalogue's; repeat it for more.")
    ] = None
    host_kv: Annotated[
        str,
        typer.Option(
            help="Host memory for each GPU's KV, such as 64GiB: workers with --offload-kv host are tried, too."
        ),
    ] = "0"
    host_weights: Annotated[
        str,
        typer.Option(
            help="Host memory for each GPU's weights, such as 64GiB: a model that does not fit is planned with "
            "--offload-weights."
        ),
    ] = "0"
    latency: Annotated[
        str | None,
        typer.Option(
            "--latency",
            "--profile",
            help="A profile's path, ledger:NAME, aiconfigurator:MODEL, distserve:MODEL, or GPU=SOURCE,…. "
            "Default: the model's roofline.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the search optimizes and which layouts it tries."""

    PANEL: ClassVar[str] = "Search"
    objective: Annotated[
        Objective | None,
        typer.Option(help="What to optimize. Default: gpus (the fewest) with --rate, goodput-per-gpu without."),
    ] = None
    affinity: Annotated[
        Affinity,
        typer.Option(help="high: KV may cross nodes; low: KV stays within a node; auto: whichever is better."),
    ] = Affinity.AUTO
    conditional_disaggregation: Annotated[
        Conditional,
        typer.Option(help="When decode workers compute prompts. auto and strict take several times as long."),
    ] = Conditional.FAILOVER
    max_prefill_degree: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most prefill workers that compute one long prompt together: layouts in which several do are tried, "
            "too. Workers on CPUs alone; takes longer.",
        ),
    ] = 1
    kv_codec: Annotated[KvCodecs, typer.Option(help="Encoding of KV between nodes.")] = KvCodecs.AUTO
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Most sequences in a worker's batch. Default: the profile's, or 256.")
    ] = None
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Prunes layouts only by bounds; takes several times as long.")
    ] = False
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0
    jobs: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes. Default: one per core.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Files to write, and what to print."""

    PANEL: ClassVar[str] = "Output"
    output: Annotated[Path, typer.Option(help="File to write for `halfmoon up --plan`.")] = Path("plan.yaml")
    compose: Annotated[
        Path | None, typer.Option(help="File to write for Docker Compose, next to docker-compose.yml.")
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="Plots attainment and goodput against the rate, into a .png or .html file.")
    ] = None
    target_map: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Instead of a plan: over which targets separate prefill and decode workers pay, into a .png or .html "
            "file.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Prints the plan, or the map, as JSON.")] = False


def plan_request(
    workload: WorkloadOptions,
    targets: TargetOptions,
    hardware: HardwareOptions,
    search: SearchOptions,
    ledger: LedgerOptions,
    *,
    of_map: bool,
) -> PlanRequest:
    """The request. Raises InvalidRequest for a price that is none, and without targets unless a map is asked for."""
    if not of_map and (targets.ttft is None or targets.tpot is None):
        raise InvalidRequest("a plan needs targets: give --ttft and --tpot, or --map FILE", param="targets")
    return PlanRequest(
        model=workload.model,
        gpu=hardware.gpu,
        workload=workload.workload,
        ttft_s=1.0 if targets.ttft is None else targets.ttft,
        tpot_s=1.0 if targets.tpot is None else targets.tpot,
        tbt_s=targets.tbt,
        tbt_of=targets.tbt_of.value,
        num_nodes=hardware.nodes,
        gpus_per_node=hardware.gpus_per_node,
        rate_per_s=workload.rate,
        attainment=targets.attainment,
        criterion=targets.criterion.value,
        objective=None if search.objective is None else search.objective.value,
        affinity=search.affinity.value,
        latency=None if hardware.latency is None else _latency(hardware.latency, ledger),
        max_running=search.max_running,
        num_requests=workload.requests,
        seed=search.seed,
        prefill_gpu=hardware.prefill_gpu,
        decode_gpu=hardware.decode_gpu,
        prices=_prices(hardware.price or []),
        kv_codec=search.kv_codec.value,
        network_gbit_per_s=hardware.network,
        context_tokens=workload.context,
        is_thorough=search.thorough,
        conditional_disaggregation=search.conditional_disaggregation.value,
        host_bytes_per_gpu=_host_bytes(hardware.host_kv, "host_kv"),
        host_weight_bytes_per_gpu=_host_bytes(hardware.host_weights, "host_weights"),
        kv_policy=workload.kv_policy,
        max_prefill_degree=search.max_prefill_degree,
    )


def _host_bytes(text: str, param: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise InvalidRequest(f"{text!r} is not a size: write one such as 64GiB", param=param) from error


def _latency(text: str, ledger: LedgerOptions) -> str:
    """Replaces profiles of the ledger by files, in one source or in GPU=SOURCE for each GPU."""
    parts = [part.rpartition("=") for part in text.split(",")]
    return ",".join(
        gpu + sign + profile_file(source, ledger.state_dir, ledger.ledger_url) for gpu, sign, source in parts
    )


def _prices(texts: Sequence[str]) -> dict[str, float]:
    prices = {}
    for text in texts:
        gpu, _, dollars = text.partition("=")
        try:
            prices[device(gpu).name] = float(dollars)
        except ValueError as error:
            raise InvalidRequest(
                f"{text!r} is not a price: write GPU=DOLLARS per hour, such as h100=2.5", param="price"
            ) from error
    return prices
