"""A latency model of six coefficients, of a whole worker, as `halfmoon up --engine sim` takes them."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece


def coefficients(
    name: str, prefill: PrefillModel, step: StepModel, kv_tokens: int, kv_token_bytes: float
) -> LatencyModel:
    """The latencies of a worker called `name`, whatever devices it has: they count as one."""
    pieces = (PrefillPiece(0, prefill),), (StepPiece(0, step),)
    return LatencyModel(*pieces, kv_tokens, kv_token_bytes, source=f"the coefficients of {name}")


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One kind of worker."""

    name: str
    latency: LatencyModel

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """Raises InvalidRequest where another parallelism is asked for: nothing is scaled."""
        if (tensor_parallel, pipeline_parallel) != (1, 1):
            raise InvalidRequest(
                f"profile {self.name} is of a whole worker: it has no TP{tensor_parallel} x PP{pipeline_parallel}",
                param="latency",
            )
        return self.latency
