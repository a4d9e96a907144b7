"""A measured profile: what one live worker took for prompts, decode steps and transfers, as JSON.

{"model": "demo", "device": "cpu", "tensor_parallel": 1, "pipeline_parallel": 1,
 "kv_tokens": 65536, "kv_bytes_per_token": 23040,
 "prefill":  [{"new_tokens": 512, "cached_tokens": 0, "seconds": 0.31}, ...],
 "step":     [{"batch": 8, "context_tokens": 4096, "seconds": 0.05}, ...],
 "transfer": [{"num_bytes": 1048576, "seconds": 0.002}, ...]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from halfmoon.errors import InvalidRequest
from halfmoon.policy.latency import StepSample
from halfmoon.sim.interpolation import PromptsSample, prefill_pieces, step_pieces
from halfmoon.sim.latency import FitError, LatencyModel


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MeasuredPrefill(_Strict):
    """One prompt alone."""

    new_tokens: int = Field(gt=0)
    cached_tokens: int = Field(default=0, ge=0)
    seconds: float = Field(gt=0)


class MeasuredStep(_Strict):
    """One decode step."""

    batch: int = Field(gt=0)
    context_tokens: int = Field(ge=0)  # of all sequences
    seconds: float = Field(gt=0)


class MeasuredTransfer(_Strict):
    """One hand-over alone on its link."""

    num_bytes: int = Field(gt=0)
    seconds: float = Field(gt=0)


class MeasuredProfile(_Strict):
    """One kind of worker, as it was measured. It is a latency source for that kind alone."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model_name: str = Field(default="", alias="model")
    device: str = ""
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    kv_tokens: int = Field(gt=0)
    kv_bytes_per_token: float = Field(gt=0)
    prefill: tuple[MeasuredPrefill, ...] = Field(min_length=1)
    step: tuple[MeasuredStep, ...] = Field(min_length=1)
    transfer: tuple[MeasuredTransfer, ...] = ()

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """What was measured is the whole worker: its stages are one. Raises InvalidRequest for another kind."""
        measured = self.tensor_parallel, self.pipeline_parallel
        if gpu not in (None, self.device) or (tensor_parallel, pipeline_parallel) != measured:
            raise InvalidRequest(
                f"the profile is of {self.device or 'its device'} with TP{measured[0]} x PP{measured[1]}, "
                f"not of {gpu or 'that'} with TP{tensor_parallel} x PP{pipeline_parallel}",
                param="latency",
            )
        prompts = [
            PromptsSample(one.new_tokens, one.new_tokens * (one.cached_tokens + one.new_tokens / 2), one.seconds)
            for one in self.prefill
        ]
        prefill, prefill_error = prefill_pieces(prompts)
        step, step_error = step_pieces([StepSample(one.batch, one.context_tokens, one.seconds) for one in self.step])
        return LatencyModel(
            prefill,
            step,
            self.kv_tokens,
            self.kv_bytes_per_token,
            source=f"measured: {self.model_name} on {self.device}",
            error=FitError(prefill_error, step_error),
            num_devices=tensor_parallel * pipeline_parallel,
        )

    @property
    def link(self) -> tuple[float, float] | None:
        """Bytes per second and latency in seconds of a hand-over, fitted; None where none was measured."""
        if not self.transfer:
            return None
        num_bytes, seconds = np.array([(one.num_bytes, one.seconds) for one in self.transfer]).T
        if len(set(num_bytes)) == 1:
            return float(num_bytes[0] / np.median(seconds)), 0.0
        weights = np.sqrt(1 / seconds)
        slope, fixed = np.polyfit(num_bytes, seconds, 1, w=weights)
        return (1 / float(slope), max(float(fixed), 0.0)) if slope > 0 else (float((num_bytes / seconds).max()), 0.0)


def read_profile(path: Path, found: Any = None) -> MeasuredProfile:
    """Raises InvalidRequest naming the field that is wrong."""
    try:
        return MeasuredProfile.model_validate(json.loads(path.read_text()) if found is None else found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"the profile {path} is wrong at {where}: {first['msg']}", param="latency") from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the profile {path} cannot be read: {error}", param="latency") from error
