"""The command lines of workers, and which GPUs and cores each one gets."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import halfmoon
from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import Role
from halfmoon.up.hosts import Hosts
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.this_host.cores import thread_environment
from halfmoon.up.this_host.gpus import GPUShares, named_gpus, visible_gpus, whole_gpus
from halfmoon.up.this_host.reserved_ports import LOOPBACK
from halfmoon.up.up_options import PreparedModel, UpOptions, WorkerStart, option_values, variables, wanted_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(ServiceSpec):
    """The spec of one worker process."""

    role: Role
    start: WorkerStart

    @property
    def gpus(self) -> tuple[str, ...]:
        """Returns its GPUs. Empty if it computes on the CPU or its GPUs are not restricted."""
        return named_gpus(self.environment) or ()


def worker_specs(
    options: UpOptions, model: PreparedModel, cluster: str, stores: Sequence[str], hosts: Hosts
) -> list[WorkerSpec]:
    """Returns the specs of all workers. `stores` may be empty."""
    workers = wanted_workers(options)
    shares = _gpus([start for _, start in workers], options)
    num_of: Counter[Role] = Counter()
    specs = []
    for (role, start), (visible, share) in zip(workers, shares, strict=True):
        index = num_of[role]
        num_of[role] += 1
        room = hosts.worker_room(start, options.device)
        spec = worker_spec(options, model, cluster, stores, role, index, start, visible, share, hosts.address)
        specs.append(replace(spec, room=room))
    hosts.share(specs)
    return specs


def worker_spec(
    options: UpOptions,
    model: PreparedModel,
    cluster: str,
    stores: Sequence[str],
    role: Role,
    index: int,
    start: WorkerStart,
    visible: Mapping[str, str],
    share: Sequence[str] = (),
    address: str = LOOPBACK,
) -> WorkerSpec:
    """Returns the spec of the `index`th worker of a role, which listens at `address`.

    `visible` is the environment that names its GPUs, `share` the arguments that limit their memory.
    """
    module = "services.decode" if role == "decode" else "services.prefill"
    common = ("--gateway", cluster, "--listen", f"{address}:0")
    chosen = {"--device": options.device, "--dtype": options.dtype, **option_values(share)}
    chosen |= option_values(options.worker_arguments) | option_values(start.arguments)
    python = chosen.pop("--engine-python", None)
    served = ("--model", model.path if options.on == "this-host" else options.model, "--model-name", model.name)
    store = ("--kv-store", stores[index % len(stores)]) if stores else ()
    state = ("--state-dir", str(options.state_dir), *store)
    service = module.removeprefix("services.")
    settings = _host_workers(service, options) | variables(service, options.settings)
    threads = options.settings.get(service, {}).get("num_threads")
    configured = chosen if threads is None else {"--num-threads": threads, **chosen}
    return WorkerSpec(
        f"{role}-{index}",
        ("-m", module, "--role", role, *common, *served, *state, *_options(chosen)),
        {
            **settings,
            **thread_environment(options, role, index, configured),
            "TOKENIZERS_PARALLELISM": "false",
            **visible,
            **_import_path(python),
        },
        restarts=True,
        num_gateways=cluster.count(",") + 1 - len(options.other_gateways),
        cluster_role="worker",
        role=role,
        start=start,
        python=str(Path(python).absolute()) if python else sys.executable,
    )


def _host_workers(service: str, options: UpOptions) -> dict[str, str]:
    """Returns the setting by which workers divide this host, unless the environment has it.

    Which of them share another host is unknown.
    """
    here = len(wanted_workers(options)) if options.on == "this-host" else 1
    found = variables(service, {service: {"host_workers": str(here)}})
    return {name: text for name, text in found.items() if name not in os.environ}


def _options(chosen: Mapping[str, str]) -> Iterator[str]:
    """Yields options and values; a value that looks like an option is joined to its own."""
    for name, value in chosen.items():
        yield from (f"{name}={value}",) if value.startswith("-") else (name, value)


def _import_path(python: str | None) -> dict[str, str]:
    """Returns the environment by which another interpreter finds the programs of a source tree.

    An installed Halfmoon must be installed there, too: our own site-packages hold other releases of its libraries.
    """
    tree = Path(halfmoon.__file__).parents[1]
    if python is None or not (tree / "pyproject.toml").exists():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))}


def _gpus(starts: Sequence[WorkerStart], options: UpOptions) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Returns environment and arguments of each worker. GPUs are assigned in turn, unless a worker needs several.

    A cluster engine assigns them itself.
    """
    if options.on != "this-host":
        return [({}, ()) for _ in starts]
    computing = iter(_gpu_shares([start for start in starts if not start.on_cpu], options.device))
    return [({}, ()) if start.on_cpu else next(computing) for start in starts]


def _gpu_shares(starts: Sequence[WorkerStart], device: str) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    gpus = visible_gpus() if device != "cpu" else {}
    planned = {start.gpu for start in starts} - {"", "cpu"}
    if device == "auto" and planned and not gpus:
        raise InvalidRequest(
            f"the plan's workers are on {', '.join(sorted(planned))}, and this host has no GPU: start it where those "
            "are, with --engine sim, or with --device cpu"
        )
    if any(start.num_gpus > 1 or start.gpu for start in starts):
        kinds = [start.gpu for start in starts]
        return [(environment, ()) for environment in whole_gpus(gpus, [start.num_gpus for start in starts], kinds)]
    shares = GPUShares(tuple(gpus), len(starts))
    return [(shares.environment(place), shares.arguments(place)) for place in range(len(starts))]
