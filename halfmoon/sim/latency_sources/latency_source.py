"""A latency source by its text: the path of a profile, or the names of a source and a model."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

from halfmoon.errors import InvalidRequest
from halfmoon.sim.json_text import parsed_json
from halfmoon.sim.latency_sources.aiconfigurator import BACKENDS, KernelTimes
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.latency_model import LatencySource
from halfmoon.sim.latency_sources.measured_profile import is_measured, read_profile
from halfmoon.sim.latency_sources.model_catalogue import model_shape
from halfmoon.sim.latency_sources.roofline import OF_2023, Efficiency, Roofline
from halfmoon.sim.latency_sources.splitwise import read_splitwise
from halfmoon.sim.latency_sources.worker_profile import PROFILES, Coefficients, load_profile

_KNOWN = (
    "a profile's path (profile.json), Splitwise's table with a model (perf_model.csv:llama-2-70b), distserve:MODEL, "
    "distserve-vllm:MODEL, roofline:MODEL[@GPU], roofline-2023:MODEL[@GPU], aiconfigurator:MODEL[@GPU] or "
    "aiconfigurator-BACKEND:MODEL[@GPU], where MODEL may be the path of a config.json, and of a roofline may end "
    "in a format of its weights or KV (+awq, +fp8, +int8-kv)"
)

_KERNEL_TIMES = MappingProxyType(
    {"aiconfigurator": BACKENDS[0], **{f"aiconfigurator-{backend}": backend for backend in BACKENDS}}
)


def latency_source(text: str) -> LatencySource:
    """Finds a source. Raises InvalidRequest, which lists the valid forms."""
    kind, _, rest = text.partition(":")
    if kind == "distserve":
        return DistServeCoefficients(rest)
    if kind == "distserve-vllm":
        return DistServeCoefficients(rest, "vllm")
    if kind in ("roofline", "roofline-2023") and rest:
        name, _, gpu = rest.partition("@")
        return Roofline(
            model_shape(name), Efficiency() if kind == "roofline" else OF_2023, device(gpu).name if gpu else None
        )
    if kind in _KERNEL_TIMES and rest:
        name, _, gpu = rest.partition("@")
        return KernelTimes(model_shape(name), _KERNEL_TIMES[kind], device(gpu).name if gpu else None)
    if kind.endswith(".csv"):
        return read_splitwise(Path(kind), rest)
    path = Path(text)
    if text not in PROFILES and (_is_measured(path) or (text.endswith(".json") and not os.path.isfile(text))):
        return read_profile(path)
    if text in PROFILES or os.path.isfile(text):  # `Path.is_file` raises for a name that is too long
        profile = load_profile(text)
        return Coefficients(profile.name, profile.latency)
    raise InvalidRequest(f"{text!r} is not a latency source: give {_KNOWN}", param="latency")


def _is_measured(path: Path) -> bool:
    """Whether the file exists and holds samples."""
    try:
        return is_measured(parsed_json(path.read_text()))
    except (OSError, ValueError):
        return False
