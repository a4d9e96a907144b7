"""Assigns the GPUs of one host, and shares of their memory, to workers. No torch: only the workers load it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from halfmoon.errors import Incompatible, InvalidRequest

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_UTILIZATION = 0.9  # share of a GPU's memory that all its workers use together
_QUERY = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
_TIMEOUT_S = 20


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns names of GPUs for CUDA_VISIBLE_DEVICES: those that it names already, or else all of this host."""
    named = environment.get(VISIBLE_GPUS)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return tuple(names[: next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))])
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, no GPU
        return ()
    return tuple(line.strip() for line in output.splitlines() if line.strip())


@dataclass(frozen=True, slots=True)
class GPUShares:
    """Assigns `num_workers` to `gpus` in turn. Workers on the same GPU share its memory."""

    gpus: tuple[str, ...]
    num_workers: int

    def environment(self, worker: int) -> dict[str, str]:
        """Returns the environment in which a worker sees only its GPU."""
        return {VISIBLE_GPUS: self.gpus[worker % len(self.gpus)]} if self.gpus else {}

    def arguments(self, worker: int) -> tuple[str, ...]:
        """Returns the arguments that limit a worker to its share of a shared GPU's memory."""
        if not self.gpus:
            return ()
        here = worker % len(self.gpus)
        num_sharing = sum(1 for other in range(self.num_workers) if other % len(self.gpus) == here)
        return () if num_sharing == 1 else ("--gpu-memory-utilization", f"{_UTILIZATION / num_sharing:.3f}")


def whole_gpus(gpus: Sequence[str], num_devices: Sequence[int]) -> list[dict[str, str]]:
    """Returns environments that give each worker its own GPUs. Raises InvalidRequest if there are too few."""
    if not gpus:
        return [{} for _ in num_devices]
    if sum(num_devices) > len(gpus):
        raise InvalidRequest(
            f"the workers need {sum(num_devices)} GPUs, and this host has {len(gpus)}: "
            "plan with --nodes and --gpus-per-node of this host"
        )
    starts = [sum(num_devices[:at]) for at in range(len(num_devices))]
    return [{VISIBLE_GPUS: ",".join(gpus[start : start + num])} for start, num in zip(starts, num_devices, strict=True)]


def gpus_beside(gpus: Sequence[str], taken: Collection[str], num_devices: Sequence[int]) -> list[dict[str, str]]:
    """Does as `whole_gpus` with the GPUs that are not `taken`. Raises Incompatible if there are too few."""
    free = [name for name in gpus if name not in taken]
    if gpus and sum(num_devices) > len(free):
        raise Incompatible(
            f"the new workers need {sum(num_devices)} GPUs, and {len(free)} of this host's {len(gpus)} are free"
        )
    return whole_gpus(free, num_devices)
