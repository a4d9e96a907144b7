"""A modelled worker's profile as a latency source: the six coefficients that `halfmoon up --engine sim` takes."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.worker_profile import WorkerProfile


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One kind of worker, whatever devices it has: they count as one."""

    profile: WorkerProfile

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """Raises InvalidRequest where another parallelism is asked for: nothing is scaled."""
        if (tensor_parallel, pipeline_parallel) != (1, 1):
            raise InvalidRequest(
                f"profile {self.profile.name} is of a whole worker: "
                f"it has no TP{tensor_parallel} x PP{pipeline_parallel}",
                param="latency",
            )
        return LatencyModel(
            (PrefillPiece(0, self.profile.prefill),),
            (StepPiece(0, self.profile.step),),
            self.profile.kv_tokens,
            float(self.profile.kv_token_bytes),
            source=f"the coefficients of {self.profile.name}",
        )
