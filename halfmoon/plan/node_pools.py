"""The hardware that a plan may use: nodes with one or several kinds of GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.hardware import Device, device

_POOL = re.compile(r"(?P<gpu>[^:]+)(:(?P<nodes>\d+)x(?P<each>\d+))?")
MOST_GPUS = 16_384  # of a kind; a search looks at every number of workers
_FORM = "give GPU, or GPU:NODESxGPUS for each kind, as h100:2x8,a100-80g:4x8"


@dataclass(frozen=True, slots=True)
class NodePool:
    """Equal nodes. Raises InvalidRequest for an empty pool."""

    gpu: Device
    num_nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.gpus_per_node) < 1:
            raise InvalidRequest("there has to be at least one node with one GPU", param="nodes")
        if self.num_gpus > MOST_GPUS:
            raise InvalidRequest(
                f"a plan has at most {MOST_GPUS:,} GPUs of a kind, got {self.num_gpus:,}: give fewer nodes",
                param="nodes",
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all its nodes."""
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.num_gpus} x {self.gpu.name}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pools of different GPUs."""

    pools: tuple[NodePool, ...]

    def pool(self, gpu: str) -> NodePool:
        """The pool of a GPU that the fleet has."""
        return next(pool for pool in self.pools if pool.gpu.name == gpu)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the GPUs."""
        return tuple(pool.gpu.name for pool in self.pools)

    @property
    def num_gpus(self) -> int:
        """GPUs of all kinds."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def is_mixed(self) -> bool:
        """Whether there are several kinds of GPU."""
        return len(self.pools) > 1

    def __str__(self) -> str:
        return " + ".join(map(str, self.pools))


def read_fleet(text: str, num_nodes: int, gpus_per_node: int, prices: Mapping[str, float]) -> Fleet:
    """Reads `h200`, or `h100:2x8,a100-80g:4x8`. A name without counts takes the given ones. `prices`: dollars per hour
    by GPU.

    Raises InvalidRequest for unknown hardware, for an empty fleet, and for an invalid price.
    """
    pools = []
    for part in text.split(","):
        match = _POOL.fullmatch(part.strip())
        if match is None:
            raise InvalidRequest(f"{part!r} is not hardware: {_FORM}", param="gpu")
        nodes, each = (int(match["nodes"]), int(match["each"])) if match["nodes"] else (num_nodes, gpus_per_node)
        pools.append(NodePool(device(match["gpu"]), nodes, each))
    names = [pool.gpu.name for pool in pools]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"a GPU is named twice in {text!r}: {_FORM}", param="gpu")
    for name in set(prices) - set(names):
        raise InvalidRequest(f"there is a price of {name}, and the GPUs are {', '.join(names)}", param="price")
    return Fleet(tuple(replace(pool, gpu=_priced(pool.gpu, prices)) for pool in pools))


def _priced(gpu: Device, prices: Mapping[str, float]) -> Device:
    price = prices.get(gpu.name, gpu.price_per_hour)
    if not (price > 0 and math.isfinite(price)):
        raise InvalidRequest(f"the price of {gpu.name} must be above 0 dollars an hour, got {price:g}", param="price")
    return replace(gpu, price_per_hour=price)
