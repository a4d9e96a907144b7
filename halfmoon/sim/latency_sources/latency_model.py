"""How long a worker's steps take: the one form that every source is brought to, and how well that form fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from halfmoon.policy.models.latency import (
    PrefillModel,
    PrefillSample,
    StepModel,
    StepSample,
    fit_prefill,
    fit_step,
)
from halfmoon.sim.latency_sources.host_memory import Cycle, HostMemory

_POLICY_PROMPTS = (
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
)  # prompt lengths at which the policies' models are fitted
_RING_TIMES = ("key_s", "query_s", "round_s")
_POLICY_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_POLICY_CONTEXTS = (256, 1024, 4096)  # of each sequence


class FitError(NamedTuple):
    """Median relative error against measurements; None without any."""

    prefill: float | None = None
    step: float | None = None


NOT_MEASURED = FitError()


_Model = TypeVar("_Model")


class Piece(NamedTuple, Generic[_Model]):
    """Holds from `least` new prompt tokens, or decoding sequences, on."""

    least: float
    model: _Model


PrefillPiece = Piece[PrefillModel]
StepPiece = Piece[StepModel]


class Ring(NamedTuple):
    """What `num_ranks` devices with the whole model exchange for a step that they share (engine: `RingAttention`).

    Keys and values go round while attention is computed, or queries and their sums do, which hides nothing: whichever
    takes less.
    """

    num_ranks: int
    key_s: float  # for each token that the step's rows see, in all layers
    query_s: float  # for each row
    round_s: float  # latency of all rounds

    def exposed_s(self, num_rows: float, num_keys: float, attention_s: float) -> float:
        """Seconds of a step's exchanges that attention on a rank, of `attention_s`, does not hide."""
        return self.round_s + min(max(self.key_s * num_keys - attention_s, 0.0), self.query_s * num_rows)


@dataclass(frozen=True)
class LatencyModel:
    """One worker of `num_stages` pipeline stages. The pieces describe one stage; all stages take the same time.

    A step that samples ends when its tokens are known, as in this project's engine: it leaves every stage idle but one.
    An engine that `fills_stages` splits its decodes into as many groups as there are stages, which follow each other.

    The prompts of a step take `a + b*new + c*pairs`, where `pairs` sums `new * (cached + new / 2)` over them, so
    several prompts share `a`. Sequences that decode in the same step share the matrix products: each counts as one more
    new token and adds its attention, `f*context`. The first stage also launches the step.
    """

    prefill: tuple[PrefillPiece, ...]  # ascending, from 0 on
    step: tuple[StepPiece, ...]  # ascending, from 0 on
    kv_tokens: int  # capacity of the worker's memory
    kv_bytes_per_token: float
    source: str
    error: FitError = NOT_MEASURED
    num_stages: int = 1
    num_devices: int = 1
    fills_stages: bool = False
    launch_s: float = 0.0
    launch_s_per_token: float = 0.0  # of all sequences in the step
    ring: Ring | None = None  # the pieces are then of one of its ranks alone
    host: HostMemory | None = None  # None: KV and weights are in the device's memory; of one stage only

    def stage_s(self, new_tokens: float, pairs: float, batch: float, context_tokens: float) -> float:
        """One stage's seconds for a step with `new_tokens` of prompts and one token for each of `batch` sequences.

        Ranks of a ring share a step with prompts if that is sooner than on one of them.
        """
        alone_s = self._alone_s(new_tokens, pairs, batch, context_tokens)
        num_keys = context_tokens
        if new_tokens:
            num_keys += pairs / new_tokens + new_tokens / 2  # of a prompt: those cached, and its own
        if self.host is not None:
            return self.host.step_s(alone_s, num_keys) if new_tokens or batch else 0.0
        if self.ring is None or not new_tokens:
            return alone_s
        num_ranks, num_rows = self.ring.num_ranks, new_tokens + batch
        shared_s = self._alone_s(*(one / num_ranks for one in (new_tokens, pairs, batch, context_tokens)))
        attention_s = _held_at(self.prefill, num_rows / num_ranks).c * pairs / num_ranks
        return min(alone_s, shared_s + self.ring.exposed_s(num_rows, num_keys, attention_s))

    def _alone_s(self, new_tokens: float, pairs: float, batch: float, context_tokens: float) -> float:
        if not new_tokens:
            return _held_at(self.step, batch).seconds(batch, context_tokens) if batch else 0.0
        together = new_tokens + batch
        prefill = _held_at(self.prefill, together)
        products_s = prefill.a + prefill.b * together
        if not batch:
            return products_s + prefill.c * pairs
        step = _held_at(self.step, batch)
        return max(products_s, step.d + step.e * batch) + prefill.c * pairs + step.f * context_tokens

    def launching_s(self, num_tokens: float) -> float:
        """Seconds that the first stage adds to a step over sequences of `num_tokens` in total."""
        return self.launch_s + self.launch_s_per_token * num_tokens

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds of a prompt alone on an idle worker, from its first stage to its last."""
        return self.prompt_s(new_tokens, new_tokens * (cached_tokens + new_tokens / 2), cached_tokens)

    def prompt_s(self, new_tokens: float, pairs: float, cached_tokens: float = 0.0) -> float:
        """The same for a prompt whose tokens attend to `pairs` in total."""
        return self.num_stages * self.stage_s(new_tokens, pairs, 0, 0) + self.launching_s(new_tokens + cached_tokens)

    def cycle(self, batch: int, context_tokens: float = 0.0) -> Cycle:
        """The time until each of `batch` sequences has its next token, without prompts in between.

        Without groups it passes through all stages. Groups follow each other in rounds. A round takes as long as the
        first stage needs for all groups; with fewer sequences than stages, it takes as long as one group needs for all
        stages. With a host's memory it holds from `context_tokens` on, up to the next bend (`bend_after`).
        """
        groups = self.num_groups(batch)
        step = _held_at(self.step, batch / groups)
        rounds = self.num_stages
        launches = groups if groups == self.num_stages else 1
        base_s = rounds * (step.d + step.e * batch / groups) + launches * self.launch_s
        slope_s = (rounds * step.f + launches * self.launch_s_per_token) / groups
        computed = Cycle(base_s, slope_s)
        return computed if self.host is None else self.host.piece(computed, context_tokens)[0]

    def step_s(self, batch: int, context_tokens: float) -> float:
        """Seconds of a decode step of `batch` sequences with `context_tokens` in total."""
        base_s, slope_s = self.cycle(batch, context_tokens)
        return base_s + slope_s * context_tokens

    def bend_after(self, batch: int, context_tokens: float) -> float:
        """The context up to which `cycle(batch, context_tokens)` holds."""
        if self.host is None:
            return math.inf
        return self.host.piece(replace(self, host=None).cycle(batch), context_tokens)[1]

    def num_groups(self, batch: int) -> int:
        """Groups of sequences that decode in different stages at the same time."""
        return max(min(self.num_stages if self.fills_stages else 1, batch), 1)

    @cached_property
    def policy_prefill(self) -> PrefillModel:
        """The prefill model that a gateway would have learned from single prompts."""
        if self._is_plain and len(self.prefill) == 1:
            return self.prefill[0].model
        return fit_prefill([PrefillSample(new, 0, self.prefill_s(new)) for new in _POLICY_PROMPTS])

    @cached_property
    def policy_step(self) -> StepModel:
        """The step model that a gateway would have learned."""
        if self._is_plain and len(self.step) == 1:
            return self.step[0].model
        samples = []
        for batch in _POLICY_BATCHES:
            samples += [StepSample(batch, batch * one, self.step_s(batch, batch * one)) for one in _POLICY_CONTEXTS]
        return fit_step(samples)

    def scaled(self, factor: float) -> LatencyModel:
        """A worker that is `factor` times as fast."""
        faster = self.with_errors(1 / factor, 1 / factor)
        ring = self.ring and self.ring._replace(**{name: getattr(self.ring, name) / factor for name in _RING_TIMES})
        host = self.host and self.host.scaled(factor)
        per_token_s = self.launch_s_per_token / factor
        return replace(faster, launch_s=self.launch_s / factor, launch_s_per_token=per_token_s, ring=ring, host=host)

    def with_errors(self, prefill: float, step: float) -> LatencyModel:
        """A worker whose prompts take `prefill` times as long, and its decode steps `step` times."""
        return replace(
            self,
            prefill=tuple(
                Piece(piece.least, PrefillModel(*(x * prefill for x in piece.model))) for piece in self.prefill
            ),
            step=tuple(Piece(piece.least, StepModel(*(x * step for x in piece.model))) for piece in self.step),
        )

    @property
    def _is_plain(self) -> bool:
        is_one = self.num_stages == 1 and self.ring is None and self.host is None
        return is_one and not self.launch_s and not self.launch_s_per_token


def _held_at(pieces: tuple[Piece[_Model], ...], size: float) -> _Model:
    """The model of the piece that holds at `size`."""
    result = pieces[0].model
    for piece in pieces:
        if piece.least > size:
            break
        result = piece.model
    return result


class LatencySource(Protocol):
    """A source of latency models: a fitted file, measurements, or a roofline."""

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """Raises InvalidRequest for unknown hardware or parallelism, and names what is known."""


def median_error(predicted_s: list[float], measured_s: list[float]) -> float:
    """Median of |predicted - measured| / measured."""
    measured = np.array(measured_s)
    return float(np.median(np.abs(np.array(predicted_s) - measured) / measured))
