"""Splitwise's table: measured prefill and decode times of Llama2-70B and BLOOM-176B on A100 and H100 (Patel et al.).

The file is `perf_model.csv` of github.com/Mutinifni/splitwise-sim; it is not part of this package.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import StepSample
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.interpolation import PromptsSample, prefill_pieces, step_pieces
from halfmoon.sim.latency_sources.latency_model import FitError, LatencyModel
from halfmoon.sim.latency_sources.model_catalogue import model_shape
from halfmoon.sim.latency_sources.roofline import Efficiency, kv_capacity_tokens

_MODELS = {"llama-2-70b": "llama2-70b", "bloom-176b": "bloom-176b"}
_GPUS = {"a100-80g": "a100-80gb", "h100": "h100-80gb"}


@dataclass(frozen=True, slots=True)
class SplitwiseTable:
    """The rows of one model: hardware, tensor parallelism, one step of prompts, one decode step."""

    name: str
    rows: tuple[tuple[str, int, PromptsSample, StepSample], ...]

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """A latency model with the roofline's KV capacity. Raises InvalidRequest for a combination that was not
        measured.
        """
        wanted = _GPUS.get(gpu or "a100-80g")
        chosen = [row for row in self.rows if row[:2] == (wanted, tensor_parallel)] if pipeline_parallel == 1 else []
        if not chosen:
            known = sorted({f"{ours} TP{row[1]}" for row in self.rows for ours, its in _GPUS.items() if its == row[0]})
            raise InvalidRequest(
                f"Splitwise did not measure {self.name} on {gpu} with TP{tensor_parallel} x PP{pipeline_parallel}: "
                f"it has {', '.join(known)}",
                param="gpu",
            )
        prompts, steps = [row[2] for row in chosen], [row[3] for row in chosen]
        prefill, prefill_error = prefill_pieces(prompts, prompts)
        step, step_error = step_pieces(steps, steps)
        shape, on = model_shape(self.name), device(gpu or "a100-80g")
        return LatencyModel(
            prefill,
            step,
            kv_tokens=max(kv_capacity_tokens(shape, on, tensor_parallel, 1, Efficiency()), 0),
            kv_bytes_per_token=shape.kv_bytes_per_token,
            source=f"Splitwise's table of {self.name} on {on.name}, TP{tensor_parallel}",
            error=FitError(prefill_error, step_error),
            num_devices=tensor_parallel,
        )


def read_splitwise(path: Path, name: str) -> SplitwiseTable:
    """Reads one model's rows. Raises InvalidRequest for a file or a model that is not Splitwise's."""
    if name not in _MODELS:
        raise InvalidRequest(f"Splitwise did not measure {name!r}: it has {', '.join(_MODELS)}", param="model")
    try:
        with path.open(newline="") as lines:
            rows = [_row(one) for one in csv.DictReader(lines) if one["model"] == _MODELS[name]]
    except (OSError, KeyError, ValueError) as error:
        raise InvalidRequest(f"{path} is not Splitwise's perf_model.csv: {error!r}", param="latency") from error
    return SplitwiseTable(name, tuple(rows))


def _row(row: dict[str, str]) -> tuple[str, int, PromptsSample, StepSample]:
    prompt, batch, output = (int(row[name]) for name in ("prompt_size", "batch_size", "token_size"))
    prompts = PromptsSample(batch * prompt, batch * prompt**2 / 2, float(row["prompt_time"]) / 1000)
    step = StepSample(batch, batch * (prompt + output / 2), float(row["token_time"]) / 1000)
    return row["hardware"], int(row["tensor_parallel"]), prompts, step
