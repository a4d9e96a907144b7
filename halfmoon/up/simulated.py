"""`halfmoon up --engine sim`: prepares a model directory without weights, and the processes of simulated workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.sim.answer_model import LengthKind, TextKind
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, WorkerProfile, load_profile
from halfmoon.up.supervisor import ServiceSpec

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "*.jinja", "vocab.*", "merges.txt")


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


def simulated_model(model: Path, simulated: SimulatedWorkers, state_dir: Path) -> Path:
    """Makes a directory with the tokenizer of `model`, no weights, and the context length of the simulated workers."""
    target = state_dir / "simulated-model"
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _TOKENIZER_FILES:
        for file in model.glob(pattern):
            shutil.copyfile(file, target / file.name)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = simulated.worker_profile().context_tokens
    (target / "config.json").write_text(json.dumps(config))
    return target


def simulation_specs(
    simulated: SimulatedWorkers, counts: Mapping[str, int], cluster: str, model: Sequence[str]
) -> list[ServiceSpec]:
    """Returns processes that share the workers of each role evenly. `model` holds the arguments that name the model."""
    settings = {
        "--profile": simulated.profile,
        "--time-scale": simulated.time_scale,
        "--text": simulated.text,
        "--length": simulated.length,
        "--median-tokens": simulated.median_tokens,
    }
    options = tuple(str(part) for pair in settings.items() for part in pair)
    specs = []
    for index in range(min(simulated.num_processes, sum(counts.values()))):
        share = {role: len(range(index, count, simulated.num_processes)) for role, count in counts.items()}
        numbers = tuple(part for role, count in share.items() for part in (f"--{role}", str(count)))
        if any(share.values()):
            arguments = ("-m", "services.simulation", "--gateway", cluster, *model, *options, *numbers)
            specs.append(ServiceSpec(f"simulation-{index}", arguments, {}, restarts=True))
    return specs
