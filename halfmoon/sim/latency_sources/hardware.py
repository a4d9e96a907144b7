"""The hardware catalogue: what vendors promise for each device, and roughly what it costs.

docs/reference/planner.md says what each figure was checked against, and how far rents differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from halfmoon.architectures.weight_format import Arithmetic
from halfmoon.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Figures are data-sheet peaks in dense bfloat16; bandwidths count one direction."""

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to other devices of its node: NVLink, or PCIe
    network_bytes_per_s: float  # its share of the node's network
    price_per_hour: float  # US dollars, on demand
    source: str
    host_bytes_per_s: float | None = None  # shared by all devices, if more than two exchange data through the host only
    fp8_speed: float = 2.0  # of products in fp8, over bfloat16; 1: there are none, and weights are widened
    int8_speed: float = 2.0
    pcie_bytes_per_s: float | None = None  # from host memory; None: the device computes in it

    def product_flops(self, arithmetic: Arithmetic) -> float:
        """The peak of matrix products in `arithmetic`."""
        speeds = {"bfloat16": 1.0, "fp8": self.fp8_speed, "int8": self.int8_speed}
        return self.flops * speeds[arithmetic]

    def exchange_bytes_per_s(self, num_devices: int) -> float:
        """Bandwidth of each of `num_devices` devices of a node that exchange with each other, in one direction."""
        if self.host_bytes_per_s is None or num_devices <= 2:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, self.host_bytes_per_s / num_devices)


_L40S = "NVIDIA L40S data sheet; PCIe 4 x16; 100 Gb/s; host by AIConfigurator's timed exchanges"
DEVICES: MappingProxyType[str, Device] = MappingProxyType(
    {
        one.name: one
        for one in (
            Device(
                *("a100-80g", 312e12, 80e9, 2.039e12, 300e9, 25e9, 1.8, "NVIDIA A100 80GB SXM data sheet; HDR 200"),
                fp8_speed=1.0,
                pcie_bytes_per_s=32e9,
            ),
            Device(
                "h100",
                989e12,
                80e9,
                3.35e12,
                450e9,
                50e9,
                3.0,
                "NVIDIA H100 SXM data sheet; NDR 400",
                pcie_bytes_per_s=64e9,
            ),
            Device(
                "h200",
                989e12,
                141e9,
                4.8e12,
                450e9,
                50e9,
                3.8,
                "NVIDIA H200 SXM data sheet; NDR 400",
                pcie_bytes_per_s=64e9,
            ),
            Device(
                "b200",
                2250e12,
                180e9,
                7.7e12,
                900e9,
                50e9,
                5.0,
                "NVIDIA HGX B200 data sheet; NDR 400",
                pcie_bytes_per_s=64e9,
            ),
            Device("l40s", 362e12, 48e9, 0.864e12, 32e9, 12.5e9, 0.9, _L40S, 22e9, pcie_bytes_per_s=32e9),
            Device(
                *("cpu", 30e12, 256e9, 0.3e12, 20e9, 3e9, 1.5, "a 32-core server with AMX and 8 DDR5-4800 channels"),
                fp8_speed=1.0,
            ),
        )
    }
)


def device(name: str) -> Device:
    """A device of the catalogue. Raises InvalidRequest, which names the known ones."""
    if name.lower() not in DEVICES:
        raise InvalidRequest(f"unknown hardware {name!r}: known are {', '.join(DEVICES)}", param="gpu")
    return DEVICES[name.lower()]
