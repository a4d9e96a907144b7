"""The roofline compared with kernels timed by NVIDIA: `python -m benchmarks.planner kernels`.

Their times are kernels alone, without launches, the host and sampling, which the roofline includes; so the roofline
should be somewhat slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.aiconfigurator import SYSTEMS
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.latency_source import latency_source

_MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")
_BACKENDS = ("trtllm", "vllm")
_TENSOR = (1, 2, 4, 8)
_SHORT, _LONG = (128, 256, 512, 1024, 2048), (4096, 8192, 16384, 32768)
_BATCHES, _CONTEXTS = (1, 4, 16, 64, 256), (512, 2048, 8192)


def show_kernels() -> None:
    """Prints the median error and its sign over three models and two engines."""
    print(f"| GPU | | {' | '.join(f'TP{tp}' for tp in _TENSOR)} |")
    print(f"|---|---|{'---|' * len(_TENSOR)}")
    for gpu in SYSTEMS:
        pairs = {tp: list(_pairs(gpu, tp)) for tp in _TENSOR}
        for what, prompts in (("prompts to 2,048", _SHORT), ("prompts from 4,096", _LONG)):
            cells = [_cell(error for pair in pairs[tp] for error in _prompt_errors(*pair, prompts)) for tp in _TENSOR]
            print(f"| {gpu} | {what} | {' | '.join(cells)} |", flush=True)
        cells = [_cell(error for pair in pairs[tp] for error in _step_errors(*pair)) for tp in _TENSOR]
        print(f"| {gpu} | steps | {' | '.join(cells)} |", flush=True)


def _pairs(gpu: str, tp: int) -> Iterator[tuple[LatencyModel, LatencyModel]]:
    """Pairs of the roofline's model and theirs for all combinations that fit."""
    for name, backend in product(_MODELS, _BACKENDS):
        sources = latency_source(f"roofline:{name}"), latency_source(f"aiconfigurator-{backend}:{name}")
        with suppress(InvalidRequest):
            ours, theirs = (source.model(gpu, tp, 1) for source in sources)
            yield ours, theirs


def _prompt_errors(ours: LatencyModel, theirs: LatencyModel, prompts: tuple[int, ...]) -> Iterator[float]:
    yield from (ours.prefill_s(tokens) / theirs.prefill_s(tokens) - 1 for tokens in prompts if tokens <= ours.kv_tokens)


def _step_errors(ours: LatencyModel, theirs: LatencyModel) -> Iterator[float]:
    for batch, context in product(_BATCHES, _CONTEXTS):
        tokens = batch * context
        if tokens <= ours.kv_tokens:
            yield _step_s(ours, batch, tokens) / _step_s(theirs, batch, tokens) - 1


def _step_s(model: LatencyModel, batch: int, tokens: int) -> float:
    base_s, slope_s = model.cycle(batch)
    return base_s + slope_s * tokens


def _cell(errors: Iterator[float]) -> str:
    values = np.array(list(errors))
    return f"{np.median(abs(values)):.0%} ({np.median(values):+.0%})" if len(values) else "-"
