"""Assigns the GPUs of one host, and shares of their memory, to workers. No torch: only the workers load it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from halfmoon.errors import Incompatible, InvalidRequest

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_UTILIZATION = 0.9  # share of a GPU's memory that all its workers use together
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")
_TIMEOUT_S = 20

HostGPUs: TypeAlias = Mapping[str, str]
"""The product's name of each GPU of a host, by its name for CUDA_VISIBLE_DEVICES; empty where the driver has none."""


def named_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names; None: it is not set."""
    named = environment.get(VISIBLE_GPUS)
    if named is None:
        return None
    names = [name.strip() for name in named.split(",")]
    return tuple(names[: next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))])


def visible_gpus(environment: Mapping[str, str] = os.environ) -> HostGPUs:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names already, or else all of this host. Asks the driver."""
    named = named_gpus(environment)
    if named == ():
        return {}
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, no GPU
        output = ""
    rows = [[part.strip() for part in line.split(",", 2)] for line in output.splitlines() if line.count(",") >= 2]
    if named is None:
        return {uuid: product for _, uuid, product in rows}
    products = {name: product for index, uuid, product in rows for name in (index, uuid)}
    return {name: products.get(name, "") for name in named}


@dataclass(frozen=True, slots=True)
class GPUShares:
    """Assigns `num_workers` to `gpus` in turn. Workers on the same GPU share its memory."""

    gpus: Sequence[str]
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


def whole_gpus(gpus: HostGPUs, num_devices: Sequence[int], kinds: Sequence[str] = ()) -> list[dict[str, str]]:
    """Returns environments that give each worker its own GPUs.

    `kinds` has the kind that a plan names for each worker, empty for any. Raises InvalidRequest if there are too few.
    """
    if not gpus:
        return [{} for _ in num_devices]
    if sum(num_devices) > len(gpus):
        raise InvalidRequest(
            f"the workers need {sum(num_devices)} GPUs, and this host has {len(gpus)}: "
            "plan with --nodes and --gpus-per-node of this host"
        )
    free, chosen = list(gpus), []
    for num, kind in zip(num_devices, kinds or [""] * len(num_devices), strict=True):
        fitting = [name for name in free if is_kind(kind, gpus[name])][:num]
        if len(fitting) < num:
            have = ", ".join(
                f"{list(gpus.values()).count(product)} x {product}" for product in dict.fromkeys(gpus.values())
            )
            raise InvalidRequest(
                f"the plan has a worker on {num} x {kind}, and what is left of this host's {have} does not: "
                "plan with the --gpu of this host"
            )
        free = [name for name in free if name not in fitting]
        chosen.append(fitting)
    return [{VISIBLE_GPUS: ",".join(names)} for names in chosen]


def is_kind(planned: str, product: str) -> bool:
    """Whether a product can be what a plan calls it: `a100-80g` is NVIDIA A100-SXM4-80GB. An unknown one can."""
    if not planned or not product:
        return True
    words = re.split(r"[^A-Z0-9]+", product.upper())
    return all(any(word.startswith(part) for word in words) for part in planned.upper().split("-"))


def gpus_beside(
    gpus: HostGPUs, taken: Collection[str], num_devices: Sequence[int], kinds: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Does as `whole_gpus` with the GPUs that are not `taken`. Raises Incompatible if there are too few."""
    free = {name: product for name, product in gpus.items() if name not in taken}
    if gpus and sum(num_devices) > len(free):
        raise Incompatible(
            f"the new workers need {sum(num_devices)} GPUs, and {len(free)} of this host's {len(gpus)} are free"
        )
    return whole_gpus(free, num_devices, kinds)
