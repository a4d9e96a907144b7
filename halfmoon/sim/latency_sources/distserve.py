"""DistServe's fitted coefficients: OPT-13B and OPT-66B on A100-80G, for its own engine and for vLLM of early 2024.

`data/distserve.json` holds them in the authors' units (ms), with the KV capacities, from the LLMServe/DistServe
repository (Apache-2.0). One stage takes `(a + b*sum(n) + c*sum(n^2)) / PP + 1*PP` ms for a prefill and `(a +
b*sum(context) + c*batch) / PP` ms for a decode step, with other coefficients from a batch of 95 on. The first stage
adds `2 + 1e-4 * sum(context)` ms. No error was published with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.latency_sources.model_catalogue import MODELS

Engine = Literal["distserve", "vllm"]

_MS = 1e-3
_LAUNCH_S, _LAUNCH_S_PER_TOKEN = 2e-3, 1e-7
_GPU = "a100-80g"


@cache
def _tables() -> Any:
    return json.loads((files("halfmoon.sim") / "data" / "distserve.json").read_text())


@dataclass(frozen=True, slots=True)
class DistServeCoefficients:
    """One model's coefficients. Raises InvalidRequest, which names the known models."""

    name: str  # opt-13b or opt-66b
    engine: Engine = "distserve"

    def __post_init__(self) -> None:
        known = _tables()["engines"][self.engine]
        if self.name not in known:
            raise InvalidRequest(f"DistServe has no coefficients of {self.name!r}: it has {', '.join(known)}")

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """Raises InvalidRequest for any other GPU, and for a parallelism that was not measured."""
        if gpu not in (None, _GPU):
            raise InvalidRequest(f"DistServe's coefficients are of {_GPU}, not of {gpu!r}", param="gpu")
        fits = _tables()["engines"][self.engine][self.name]
        capacities = _tables()["kv_tokens"][self.name]
        capacity = capacities.get(f"{tensor_parallel}x{pipeline_parallel}")
        if str(tensor_parallel) not in fits or capacity is None:
            known = ", ".join(capacity for capacity in capacities if capacity.split("x")[0] in fits)
            raise InvalidRequest(
                f"DistServe has no figures of {self.name} with TP{tensor_parallel} x PP{pipeline_parallel}: "
                f"it has (TPxPP) {known}",
                param="tensor_parallel",
            )
        return _model(self, fits[str(tensor_parallel)], capacity, tensor_parallel, pipeline_parallel)


def _model(of: DistServeCoefficients, fit: Any, kv_tokens: int, tp: int, pp: int) -> LatencyModel:
    a, b, c = (one * _MS / pp for one in fit["prefill"])
    small, large = (
        StepModel(d, e, f) for d, f, e in ([one * _MS / pp for one in fit[key]] for key in ("small", "large"))
    )
    return LatencyModel(
        prefill=(PrefillPiece(0, PrefillModel(a + _MS * pp, b, 2 * c)),),
        step=(StepPiece(0, small), StepPiece(fit["large_from"], large)),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=MODELS[of.name].kv_bytes_per_token,
        source=f"DistServe's coefficients of {of.name} on {_GPU} ({of.engine}), TP{tp} x PP{pp}",
        num_stages=pp,
        num_devices=tp * pp,
        fills_stages=True,
        launch_s=_LAUNCH_S,
        launch_s_per_token=_LAUNCH_S_PER_TOKEN,
    )
