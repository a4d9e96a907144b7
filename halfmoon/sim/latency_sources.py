"""A latency source by what a user writes: the path of a profile, or the name of a source and of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfmoon.errors import InvalidRequest
from halfmoon.sim.coefficients import Coefficients
from halfmoon.sim.distserve import DistServeCoefficients
from halfmoon.sim.latency import LatencySource
from halfmoon.sim.model_shape import model_shape
from halfmoon.sim.profile import read_profile
from halfmoon.sim.roofline import Roofline
from halfmoon.sim.splitwise import read_splitwise
from halfmoon.sim.worker_profile import PROFILES, load_profile

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
    if text in PROFILES or _has_coefficients(Path(text)):
        return Coefficients(load_profile(text))
    if Path(text).is_file() or text.endswith(".json"):
        return read_profile(Path(text))
    raise InvalidRequest(f"{text!r} is no latency source: give {_KNOWN}", param="latency")


def _has_coefficients(path: Path) -> bool:
    """Whether a file gives `prefill` or `step` as numbers, where a measured profile has samples."""
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    given = [found.get(name) for name in ("prefill", "step")] if isinstance(found, dict) else []
    return any(isinstance(one, list) and one and isinstance(one[0], int | float) for one in given)
