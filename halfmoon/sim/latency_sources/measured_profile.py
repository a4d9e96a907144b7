"""A measured profile: what live workers of one kind took for prompts, decode steps and transfers, as JSON.

{"model": "demo", "device": "cpu", "tensor_parallel": 1, "pipeline_parallel": 1,
 "kv_tokens": 65536, "kv_bytes_per_token": 23040,
 "limits":   {"context_tokens": 2048, "max_batch_tokens": 512, "chunk_tokens": 128, "max_running": 64,
              "nests_steps": false},
 "prefill":  [{"new_tokens": 512, "cached_tokens": 0, "seconds": 0.31, "is_held_out": false}, ...],
 "step":     [{"batch": 8, "context_tokens": 4096, "seconds": 0.05}, ...],
 "transfer": [{"num_bytes": 1048576, "seconds": 0.002, "transport": "shm"}, ...],
 "beside":   [{"work": "prefill", "neighbour": "decode", "slowdown": 1.9}, ...],
 "request_s": 0.006, "answer_s": 0.012, "token_s": 0.001}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import StepSample
from halfmoon.sim.cluster.cluster_spec import BatchLimits
from halfmoon.sim.cluster.contention import Work
from halfmoon.sim.json_text import parsed_json
from halfmoon.sim.latency_sources.interpolation import PromptsSample, prefill_pieces, step_pieces
from halfmoon.sim.latency_sources.latency_model import FitError, LatencyModel, Piece

_SHORTEST_S, _LONGEST_S = 1e-12, 1e9  # of a measurement: fits weigh them by their squares


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MeasuredPrefill(_Strict):
    """One prompt alone."""

    new_tokens: int = Field(gt=0)
    cached_tokens: int = Field(default=0, ge=0)
    seconds: float = Field(ge=_SHORTEST_S, le=_LONGEST_S)
    is_held_out: bool = False  # checks the fit, which was made without it


class MeasuredStep(_Strict):
    """One decode step."""

    batch: int = Field(gt=0)
    context_tokens: int = Field(ge=0)  # of all sequences
    seconds: float = Field(ge=_SHORTEST_S, le=_LONGEST_S)
    is_held_out: bool = False


class MeasuredTransfer(_Strict):
    """One hand-over alone on its link."""

    num_bytes: int = Field(gt=0)
    seconds: float = Field(ge=_SHORTEST_S, le=_LONGEST_S)
    transport: str = ""


class MeasuredLimits(_Strict):
    """Limits of the worker's steps."""

    context_tokens: int = Field(default=131_072, gt=0)
    max_batch_tokens: int = Field(default=2048, gt=0)
    chunk_tokens: int = Field(default=512, gt=0)
    max_running: int = Field(default=64, gt=0)
    nests_steps: bool = False  # short prompts run in the middle of prefill steps (`policy/nested_step.py`)


class MeasuredSlowdown(_Strict):
    """How many times as long `work` took while another worker of the host did its own work without a pause."""

    work: Work
    neighbour: Work
    slowdown: float = Field(gt=0)


class MeasuredProfile(_Strict):
    """Measurements of one kind of worker. It is a latency source for that kind only."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model_name: str = Field(default="", alias="model")
    device: str = ""
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    kv_tokens: int = Field(gt=0, le=10**15)
    kv_bytes_per_token: float = Field(gt=0)
    prefill: tuple[MeasuredPrefill, ...] = Field(min_length=1)
    step: tuple[MeasuredStep, ...] = Field(min_length=1)
    transfer: tuple[MeasuredTransfer, ...] = ()
    limits: MeasuredLimits = MeasuredLimits()
    beside: tuple[MeasuredSlowdown, ...] = ()
    request_s: float = Field(default=0.0, ge=0)  # from the client to the worker: HTTP, placement, calls
    answer_s: float = Field(default=0.0, ge=0)  # from the computed prompt to its token at the client
    # extra time of a decode step whose tokens a gateway serves
    token_s: float = Field(default=0.0, ge=0, le=_LONGEST_S)

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """A latency model of the worker as a whole, with its stages as one. Raises InvalidRequest for another kind of
        worker.
        """
        measured = self.tensor_parallel, self.pipeline_parallel
        if gpu not in (None, self.device) or (tensor_parallel, pipeline_parallel) != measured:
            raise InvalidRequest(
                f"the profile is of {self.device or 'its device'} with TP{measured[0]} x PP{measured[1]}, "
                f"not of {gpu or 'that'} with TP{tensor_parallel} x PP{pipeline_parallel}",
                param="latency",
            )
        whole = self.whole
        served = [Piece(piece.least, piece.model._replace(d=piece.model.d + self.token_s)) for piece in whole.step]
        return replace(whole, step=tuple(served))

    @property
    def whole(self) -> LatencyModel:
        """The latency model fitted to all points. Its error is measured at held-out points, if there are any, for a fit
        to the other points.
        """
        prompts, steps = (
            [_prompts_sample(piece) for piece in self.prefill],
            [_step_sample(piece) for piece in self.step],
        )
        prefill, _ = prefill_pieces(prompts, prompts)
        step, _ = step_pieces(steps, steps)
        _, prefill_error = prefill_pieces(*_split(self.prefill, _prompts_sample))
        _, step_error = step_pieces(*_split(self.step, _step_sample))
        return LatencyModel(
            prefill,
            step,
            self.kv_tokens,
            self.kv_bytes_per_token,
            source=f"measured: {self.model_name} on {self.device}",
            error=FitError(prefill_error, step_error),
            num_devices=self.tensor_parallel * self.pipeline_parallel,
        )

    def as_json(self) -> dict[str, Any]:
        """The JSON form that `read_profile` reads."""
        result: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        return result

    @property
    def batch_limits(self) -> BatchLimits:
        """Limits of its steps."""
        return BatchLimits(**self.limits.model_dump(exclude={"context_tokens"}))

    @property
    def contention(self) -> dict[str, float]:
        """The measured fields of `Contention`. A worker that was not slowed down counts as unaffected."""
        return {f"{slowdown.work}_beside_{slowdown.neighbour}": max(slowdown.slowdown, 1.0) for slowdown in self.beside}

    @property
    def network(self) -> dict[str, Any]:
        """The measured fields of `Network`, if any."""
        if self.link is None:
            return {}
        bytes_per_s, latency_s = self.link
        return {"bytes_per_s": bytes_per_s, "node_bytes_per_s": bytes_per_s, "latency_s": latency_s}

    @property
    def link(self) -> tuple[float, float] | None:
        """Fitted bytes per second and latency in seconds of a hand-over; None if none was measured.

        If several transports were measured, this is the first, which is also offered first.
        """
        if not self.transfer:
            return None
        used = [transfer for transfer in self.transfer if transfer.transport == self.transfer[0].transport]
        num_bytes, seconds = np.array([(transfer.num_bytes, transfer.seconds) for transfer in used]).T
        if len(set(num_bytes)) == 1:
            return float(num_bytes[0] / np.median(seconds)), 0.0
        weights = np.sqrt(1 / seconds)
        slope, fixed = np.polyfit(num_bytes, seconds, 1, w=weights)
        return (1 / float(slope), max(float(fixed), 0.0)) if slope > 0 else (float((num_bytes / seconds).max()), 0.0)


_Sample = TypeVar("_Sample", MeasuredPrefill, MeasuredStep)
_Fitted = TypeVar("_Fitted")


def _split(samples: Sequence[_Sample], fitted: Callable[[_Sample], _Fitted]) -> tuple[list[_Fitted], list[_Fitted]]:
    """Points for the fit and points to check it. These are the same if none are held out."""
    held_out = [fitted(sample) for sample in samples if sample.is_held_out]
    made_of = [fitted(sample) for sample in samples if not sample.is_held_out]
    return made_of or held_out, held_out or made_of


def _prompts_sample(sample: MeasuredPrefill) -> PromptsSample:
    return PromptsSample(
        sample.new_tokens, sample.new_tokens * (sample.cached_tokens + sample.new_tokens / 2), sample.seconds
    )


def _step_sample(sample: MeasuredStep) -> StepSample:
    return StepSample(sample.batch, sample.context_tokens, sample.seconds)


def is_measured(value: Any) -> bool:
    """Whether a JSON object holds samples, rather than coefficients."""
    given = [value.get(name) for name in ("prefill", "step")] if isinstance(value, dict) else []
    return any(isinstance(one, list) and one and isinstance(one[0], dict) for one in given)


def write_profile(path: Path, profile: MeasuredProfile) -> None:
    """Writes a profile that `read_profile` reads."""
    path.write_text(json.dumps(profile.as_json(), indent=1))


def read_profile(path: Path, value: Any = None) -> MeasuredProfile:
    """Reads a profile. Raises InvalidRequest, which names the wrong field."""
    try:
        return MeasuredProfile.model_validate(parsed_json(path.read_text()) if value is None else value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"the profile {path} is wrong at {where}: {first['msg']}", param="latency") from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the profile {path} cannot be read: {error}", param="latency") from error
