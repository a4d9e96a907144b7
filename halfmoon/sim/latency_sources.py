"""A latency source by what a user writes: the path of a profile, or the name of a source and of a model."""

from __future__ import annotations

from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.sim.distserve import DistServeCoefficients
from halfmoon.sim.latency import LatencySource
from halfmoon.sim.model_shape import model_shape
from halfmoon.sim.profile import read_profile
from halfmoon.sim.roofline import Roofline
from halfmoon.sim.splitwise import read_splitwise

_KNOWN = (
    "a profile's path (profile.json), Splitwise's table with a model (perf_model.csv:llama-2-70b), distserve:MODEL, "
    "distserve-vllm:MODEL, or roofline:MODEL[@GPU], where MODEL may be the path of a config.json"
)


def latency_source(text: str) -> LatencySource:
    """Raises InvalidRequest saying what may be written."""
    kind, _, rest = text.partition(":")
    if kind == "distserve":
        return DistServeCoefficients(rest)
    if kind == "distserve-vllm":
        return DistServeCoefficients(rest, "vllm")
    if kind == "roofline" and rest:
        name, _, gpu = rest.partition("@")
        return Roofline(model_shape(name), default_gpu=gpu or None)
    if kind.endswith(".csv"):
        return read_splitwise(Path(kind), rest)
    if Path(text).is_file() or text.endswith(".json"):
        return read_profile(Path(text))
    raise InvalidRequest(f"{text!r} is no latency source: give {_KNOWN}", param="latency")
