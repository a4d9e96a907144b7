"""`halfmoon up --engine sim`: prepares a model directory without weights, and the processes of simulated workers."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfmoon.config.worker import WorkerConfig
from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.sim.answer_model import LengthKind, TextKind
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, WorkerProfile, load_profile
from halfmoon.up.specs.stores import list_item
from halfmoon.up.supervision.child import ServiceSpec

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "*.jinja", "vocab.*", "merges.txt")
_LIMITS = ("--max-batch-tokens", "--chunk-tokens", "--max-running")
_TAKEN = (
    *_LIMITS,
    "--block-tokens",
    "--lease-s",
    "--drain-s",
    "--unit",
)  # options of workers that simulated ones have, too


@dataclass(frozen=True, slots=True)
class SimulatedWorkers:
    """Options of simulated workers. Raises InvalidRequest for an unknown profile."""

    profile: str = DEFAULT_PROFILE
    time_scale: float = 1.0
    text: TextKind = "random"
    length: LengthKind = "drawn"
    median_tokens: int = 200
    num_processes: int = 1

    def __post_init__(self) -> None:
        self.worker_profile()
        if self.num_processes < 1:
            raise InvalidRequest("--sim-processes must be at least 1")

    def worker_profile(self) -> WorkerProfile:
        """Returns the latencies of each worker."""
        return load_profile(self.profile).scaled(self.time_scale)

    def check_limits(self, workers: Iterable[Mapping[str, str]]) -> None:
        """Raises InvalidRequest if a worker's options contradict each other."""
        profile = self.worker_profile()
        for limits in dict.fromkeys(tuple(map(arguments.get, _LIMITS)) for arguments in workers):
            tokens, chunk, running = (None if limit is None else int(limit) for limit in limits)
            if tokens is not None and running is not None and tokens <= running:
                raise InvalidRequest(
                    f"simulated workers need more batch tokens ({tokens}) than running sequences ({running}): raise "
                    "max_batch_tokens or lower max_running"
                )
            profile.limited(tokens, chunk, running)


def simulated_model(model: Path, simulated: SimulatedWorkers, state_dir: Path) -> Path:
    """Makes a directory with the tokenizer of `model`, no weights, and the context length of the simulated workers.

    Raises InvalidRequest if the state directory cannot be written.
    """
    target = state_dir / "simulated-model"
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = simulated.worker_profile().context_tokens
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in (file for pattern in _TOKENIZER_FILES for file in model.glob(pattern)):
            shutil.copyfile(file, target / file.name)
        (target / "config.json").write_text(json.dumps(config))
    except OSError as error:
        raise InvalidRequest(
            f"{target} cannot be written: {error.strerror}; make room or change --state-dir"
        ) from error
    return target


def simulation_specs(
    simulated: SimulatedWorkers,
    workers: Sequence[tuple[Role, Mapping[str, str]]],
    cluster: str,
    model: Sequence[str],
    stores: Sequence[str] = (),
) -> list[ServiceSpec]:
    """Returns processes that share the workers of each role evenly; workers with other options have other processes.

    A worker is its role and its options, of which a simulated worker takes some. `model` holds the arguments that name
    the model.
    """
    settings = {
        "--profile": simulated.profile,
        "--time-scale": simulated.time_scale,
        "--text": simulated.text,
        "--length": simulated.length,
        "--median-tokens": simulated.median_tokens,
    }
    kv_stores = (("--kv-store", list_item(store)) for store in stores)
    options = tuple(str(part) for pair in (*settings.items(), *kv_stores) for part in pair)
    alike: dict[tuple[str, ...], Counter[Role]] = defaultdict(Counter)
    for role, arguments in workers:
        taken = tuple(part for name in _TAKEN if name in arguments for part in (name, arguments[name]))
        alike[taken][role] += 1
    shares = [
        (taken, {role: len(range(index, counts[role], simulated.num_processes)) for role in ROLES})
        for taken, counts in alike.items()
        for index in range(simulated.num_processes)
    ]
    specs: list[ServiceSpec] = []
    for taken, share in shares:
        numbers = tuple(part for role, count in share.items() for part in (f"--{role}", str(count)))
        if any(share.values()):
            command = ("-m", "services.simulation", "--gateway", cluster, *model, *options, *taken, *numbers)
            specs.append(ServiceSpec(f"simulation-{len(specs)}", command, {}, restarts=True, cluster_role="worker"))
    return specs


def ignored_settings(workers: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the settings among workers' options that would change a real worker, and no simulated one."""
    return sorted(
        {
            field
            for arguments in workers
            for name, text in arguments.items()
            if name not in _TAKEN and text != _default(field := name.removeprefix("--").replace("-", "_"))
        }
    )


def _default(field: str) -> str:
    default = WorkerConfig.model_fields[field].default
    return str(default).lower() if isinstance(default, bool) else str(default)
