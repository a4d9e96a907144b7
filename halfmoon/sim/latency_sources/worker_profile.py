"""A modelled worker: how long its work takes, how much KV it holds, and how fast it sends KV."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import NUM_COEFFICIENTS, PrefillModel, StepModel
from halfmoon.sim.json_text import parsed_json
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, is_measured, read_profile

_ROUNDING_S = 1e-9
_MOST = 10**15  # tokens, bytes or sequences of a worker


def _check(holds: bool, what: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"a latency profile's {what} {problem}", param="profile")


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """One kind of worker, such as a model on eight GPUs. Times describe the whole worker; nothing is scaled."""

    name: str
    latency: LatencyModel
    link_bytes_per_s: float  # to another worker; 0: transfers take no time
    link_latency_s: float = 0.0
    context_tokens: int = 131_072  # longest prompt + output
    max_batch_tokens: int = 8_192  # of a step
    chunk_tokens: int = 512  # of prefill in a step that also decodes
    max_running: int = 256  # sequences in a step
    follows_targets: bool = True  # TBT targets determine prefill in such a step, unless `chunk_tokens` is named
    nests_steps: bool = False  # short prompts run in the middle of prefill steps (`policy/nested_step.py`)

    def __post_init__(self) -> None:
        for least, (base, slope, of_context) in (*self.latency.prefill, *self.latency.step):
            held = base + slope * least, slope, of_context  # a later piece may be steeper, starting below 0
            are_times = all(-_ROUNDING_S <= value < math.inf for value in held)
            _check(are_times, "prefill and step", "must not be negative, and finite")
        link = self.link_bytes_per_s, self.link_latency_s
        _check(all(0 <= value < math.inf for value in link), "the link", "must not be negative, and finite")
        _check(self.latency.kv_bytes_per_token < math.inf, "kv_token_bytes", "must be finite")
        sizes = "kv_tokens", "kv_token_bytes", "context_tokens", "max_batch_tokens", "chunk_tokens", "max_running"
        for name in sizes:
            size = getattr(self, name)
            is_whole = isinstance(size, int) and not isinstance(size, bool)
            _check(is_whole and 1 <= size <= _MOST, name, f"must be at least 1, a whole number and at most {_MOST:,}")
        for name in ("follows_targets", "nests_steps"):
            _check(isinstance(getattr(self, name), bool), name, "must be true or false")
        _check(self.max_batch_tokens > self.max_running, "max_batch_tokens", "must exceed max_running")

    @property
    def prefill(self) -> PrefillModel:
        """The prefill model that it announces to gateways."""
        return self.latency.policy_prefill

    @property
    def step(self) -> StepModel:
        """The step model that it announces to gateways."""
        return self.latency.policy_step

    @property
    def kv_tokens(self) -> int:
        """KV tokens that its memory holds."""
        return self.latency.kv_tokens

    @property
    def kv_token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return round(self.latency.kv_bytes_per_token)

    def scaled(self, factor: float) -> WorkerProfile:
        """A worker that is `factor` times as fast in everything."""
        _check(factor > 0, "the time scale", "must be above 0")
        return replace(
            self,
            latency=self.latency.scaled(factor),
            link_bytes_per_s=self.link_bytes_per_s * factor,
            link_latency_s=self.link_latency_s / factor,
        )

    def limited(
        self, max_batch_tokens: int | None = None, chunk_tokens: int | None = None, max_running: int | None = None
    ) -> WorkerProfile:
        """The same worker with other limits of a step. None keeps the profile's, as far as the given ones allow it."""
        running, tokens = max_running or self.max_running, max_batch_tokens or self.max_batch_tokens
        if max_running is None:
            running = max(1, min(running, tokens - 1))
        elif max_batch_tokens is None:
            tokens = max(tokens, running + 1)
        return replace(
            self,
            max_batch_tokens=tokens,
            chunk_tokens=chunk_tokens or self.chunk_tokens,
            max_running=running,
            follows_targets=self.follows_targets and chunk_tokens is None,
        )

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds that the KV of `num_tokens` is on the link."""
        if not self.link_bytes_per_s:
            return self.link_latency_s
        return self.link_latency_s + num_tokens * self.kv_token_bytes / self.link_bytes_per_s


def coefficients(
    name: str, prefill: PrefillModel, step: StepModel, kv_tokens: int, kv_token_bytes: float
) -> LatencyModel:
    """A latency model of six coefficients, as `halfmoon up --engine sim` takes them. The worker counts as one
    device.
    """
    pieces = (PrefillPiece(0, prefill),), (StepPiece(0, step),)
    return LatencyModel(*pieces, kv_tokens, kv_token_bytes, source=f"the coefficients of {name}")


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A latency source for one kind of worker."""

    name: str
    latency: LatencyModel

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """Raises InvalidRequest for any other parallelism: nothing is scaled."""
        if (tensor_parallel, pipeline_parallel) != (1, 1):
            raise InvalidRequest(
                f"profile {self.name} is of a whole worker: it has no TP{tensor_parallel} x PP{pipeline_parallel}",
                param="latency",
            )
        return self.latency


INSTANT = "instant"

# Rooflines at half of the peak for products and 80 % for memory; not measured. Eight A800-80GB have 2.5 PFLOP/s
# and 16 TB/s: a token takes 2 x 70e9 FLOP, a pair of tokens 4 x 8192 x 80, the weights 140 GB, a token's KV 320 KiB;
# 160 all-reduces a pass and the launches of kernels make up the rest of a and d. One H100: 0.99 PFLOP/s, 3.35 TB/s.
PROFILES: dict[str, WorkerProfile] = {
    profile.name: profile
    for profile in (
        WorkerProfile(
            INSTANT,
            coefficients(INSTANT, PrefillModel(), StepModel(), kv_tokens=16_000_000, kv_token_bytes=131_072),
            link_bytes_per_s=0.0,
            max_running=2_048,
        ),
        WorkerProfile(
            "llama2-70b-8xa800",
            coefficients(
                "llama2-70b-8xa800",
                PrefillModel(0.02, 1.12e-4, 2.1e-9),
                StepModel(0.018, 1.1e-4, 2.5e-8),
                kv_tokens=1_300_000,
                kv_token_bytes=327_680,
            ),
            link_bytes_per_s=50e9,
            link_latency_s=0.001,
        ),
        WorkerProfile(
            "llama3-8b-h100",
            coefficients(
                "llama3-8b-h100",
                PrefillModel(0.01, 3.2e-5, 1.06e-9),
                StepModel(0.0075, 3e-5, 4.9e-8),
                kv_tokens=400_000,
                kv_token_bytes=131_072,
            ),
            link_bytes_per_s=40e9,
            link_latency_s=0.001,
        ),
    )
}
DEFAULT_PROFILE = "llama2-70b-8xa800"


def load_profile(name: str) -> WorkerProfile:
    """Loads one of `PROFILES`, or a JSON file with a measured profile or with coefficients.

    Coefficients are `prefill` as `[a, b, c]` and `step` as `[d, e, f]`, in seconds as in `policy.models.latency`,
    `kv_tokens`, `kv_token_bytes` and the other fields of `WorkerProfile`. Omitted fields come from the profile named by
    `like` (default: DEFAULT_PROFILE). Raises InvalidRequest.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not os.path.isfile(path):  # `Path.is_file` raises for a name that is too long
        raise InvalidRequest(
            f"unknown latency profile {name!r}: known are {', '.join(PROFILES)}, or a JSON file", param="profile"
        )
    try:
        given = parsed_json(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="profile") from error
    if not isinstance(given, dict):
        raise InvalidRequest(f"{path} must hold one JSON object", param="profile")
    if is_measured(given):
        return _measured(path.stem, read_profile(path, given))
    return _from_fields({"name": path.stem, **given}, str(path))


def _measured(name: str, profile: MeasuredProfile) -> WorkerProfile:
    bytes_per_s, latency_s = profile.link or (0.0, 0.0)
    limits = profile.limits.model_dump()
    return WorkerProfile(name, profile.whole, bytes_per_s, latency_s, **limits, follows_targets=False)


def _from_fields(given: dict[str, Any], source: str) -> WorkerProfile:
    like = given.pop("like", DEFAULT_PROFILE)
    if not isinstance(like, str) or like not in PROFILES:
        raise InvalidRequest(f"{source} is like {like!r}; there are {', '.join(PROFILES)}", param="profile")
    base = PROFILES[like]
    own = {field.name for field in fields(WorkerProfile)} - {"latency"}
    of_latency = {name: getattr(base, name) for name in ("prefill", "step", "kv_tokens", "kv_token_bytes")}
    known = own | set(of_latency)
    if unknown := sorted(set(given) - known):
        raise InvalidRequest(f"{source} names {', '.join(unknown)}; a profile has {', '.join(sorted(known))}")
    try:
        values = of_latency | {name: given[name] for name in of_latency if name in given}
        for model in ("prefill", "step"):
            _check(len(values[model]) == NUM_COEFFICIENTS, model, "must have three coefficients")
        values["prefill"], values["step"] = PrefillModel(*values["prefill"]), StepModel(*values["step"])
        latency = coefficients(given["name"], **values)
        named = {"follows_targets": "chunk_tokens" not in given}
        return replace(base, latency=latency, **named | {name: given[name] for name in own if name in given})
    except TypeError as error:
        raise InvalidRequest(f"{source} is not a latency profile: {error}", param="profile") from error
