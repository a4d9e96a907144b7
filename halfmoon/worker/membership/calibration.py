"""Measures a worker before it joins: a few prefills and decode steps, kept for its next start."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

import halfmoon
from halfmoon.config.worker import Calibrate
from halfmoon.engine.checkpoint.converted import locked
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.native.compiler import processor, sources_digest
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.step_result import StepResult
from halfmoon.host_limits import num_cores, num_threads
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.models.latency import (
    PrefillModel,
    PrefillSample,
    StepModel,
    StepSample,
    prefill_sample,
    profile_prefill,
    profile_step,
)
from halfmoon.rpc.processes.private_files import write_private
from halfmoon.worker.membership.trials import Trial, TrialRoom, fits, trial_requests, trials, trials_text, warm_up

log = logging.getLogger(__name__)

_FOLDER = "profiles"  # inside the state directory
# Of an engine's configuration; named in a kind where they differ from what is usual.
_FOR_SPEED = ("max_running", "host_weights", "offload", "mixed_attention", "cuda_graphs", "speculation")
_KIND_CHARACTERS = 256
_PAUSE = 1.5  # times the usual step of a trial


@dataclass(slots=True)
class Profile:
    """Measurements of one kind of worker."""

    kind: str
    prefills: list[PrefillSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)

    @property
    def prefill_model(self) -> PrefillModel:
        """Fitted prefill model; zeros if nothing was measured."""
        return profile_prefill(self.prefills)

    @property
    def step_model(self) -> StepModel:
        """Fitted decode-step model; zeros if nothing was measured."""
        return profile_step(self.steps)


def calibrated(engine: Engine, role: str, how: Calibrate, seconds: float, state_dir: Path) -> Profile | None:
    """Loads an earlier start's profile or measures one in about `seconds`; None if `how` is "never"."""
    if how == "never":
        return None
    kind = kind_of(engine, role)
    file = profile_file(state_dir, kind)
    kept = partial(load_profile, file, kind) if how == "auto" else lambda: None
    profile = kept()
    if profile is None:
        with _alone_in_calibration(file, engine.config.device):
            profile = kept() or _measured(engine, role, kind, seconds, file)  # kept by one of its kind, by now
    _warm_up(engine, seconds)  # for the first request, where nothing was measured
    log_profile(profile)
    return profile


def _measured(engine: Engine, role: str, kind: str, seconds: float, file: Path) -> Profile:
    profile, config = measure(engine, role, kind, seconds), engine.config
    ranks = {"tensor_parallel": config.tensor_parallel, "pipeline_parallel": config.pipeline_parallel}
    described = {"model": engine.checkpoint.name, "device": device_name(config.device), **ranks}
    keep_profile(file, profile, described, engine.layout, engine.num_blocks)
    return profile


@contextmanager
def _alone_in_calibration(file: Path, device: str) -> Iterator[None]:
    """Waits until no worker of the same cores, or on GPUs of the same kind, measures itself for this state directory.

    On the same cores each would measure the other along, and of workers of one kind one measures for all.
    """
    folder, name = file.parent.parent, "cpu" if device == "cpu" else file.stem
    with ExitStack() as stack:
        with suppress(OSError):  # where it cannot be written no profile is kept, either
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / f"calibration-{name}.lock"))
        yield


def missing_of(profile: Profile) -> str:
    """Returns what the profile lacks; "" if nothing."""
    measured = {"prompts": profile.prefills, "decode steps": profile.steps}
    return " and ".join(name for name, samples in measured.items() if not samples)


def log_profile(profile: Profile) -> None:
    """Logs the fitted models, and what could not be measured."""
    models = {"prefill": profile.prefill_model._asdict(), "step": profile.step_model._asdict()}
    log.info("worker.calibrated", extra={"kind": profile.kind, **models})
    if missing := missing_of(profile):
        reason = f"{missing} could not be measured: predictions begin without, and chunks have a constant length"
        advice = "a longer calibrate_s gives them time; a longer context and more KV memory give them room"
        log.warning("worker.calibrated_in_part", extra={"reason": f"{reason}; {advice}"})


def profile_file(state_dir: Path, kind: str) -> Path:
    """Where the profile of a kind of worker is kept."""
    return state_dir / _FOLDER / f"{hashlib.blake2b(kind.encode(), digest_size=8).hexdigest()}.json"


def kind_of(engine: Engine, role: str) -> str:
    """Describes everything on which a profile depends: a profile holds for workers with the same description."""
    config, usual = engine.config, EngineConfig()
    changed = (name for name in _FOR_SPEED if getattr(config, name) != getattr(usual, name))
    return kind_text(
        role,
        engine.checkpoint.fingerprint,
        device_name(engine.config.device),
        f"{config.dtype}, KV {engine.layout.dtype}",
        f"weights {engine.checkpoint.quantization}",
        *([f"kernels {sources_digest()}"] if config.device == "cpu" else ()),
        config.attention_backend,
        f"TP{config.tensor_parallel} PP{config.pipeline_parallel} SP{config.sequence_parallel}",
        f"{config.num_threads or num_threads()} threads",
        f"steps of {config.step_tokens}",
        *(f"{name} {getattr(config, name)}" for name in changed),
        trials_text(_room(engine), role),
    )


def kind_text(*parts: str) -> str:
    """Joins what describes a kind of worker and this version, in as many characters as the ledger has for it."""
    text = ", ".join((*parts, f"halfmoon {halfmoon.__version__}"))
    if len(text) <= _KIND_CHARACTERS:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: _KIND_CHARACTERS - len(digest) - 1]} {digest}"


def device_name(device: str) -> str:
    """The device and its processor. Hosts may share profiles, and those of a cloud call different processors alike."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    described = processor()
    named = re.search(r"^model name\s*: (.+)$", described, re.MULTILINE)
    digest = hashlib.blake2b(described.encode(), digest_size=3).hexdigest()
    return f"{device} {named[1] if named else platform.machine()} {digest} x{num_cores()}"


def measure(engine: Engine, role: str, kind: str, seconds: float) -> Profile:
    """Runs trials on an engine not yet in use until `seconds` are over. The engine is left as it was."""
    profile = Profile(kind)
    _warm_up(engine, seconds)
    give_up_s = time.monotonic() + seconds
    for trial in trials(_room(engine), role):
        results = _run(engine, trial, give_up_s)
        if trial.num_given:  # the first attention to so much touches its memory
            results = _run(engine, trial, give_up_s) or results
        note_steps(profile, trial, results)
        if time.monotonic() > give_up_s:
            break
    engine.forget_prefixes()
    return profile


def _room(engine: Engine) -> TrialRoom:
    config = engine.config
    return TrialRoom(
        config.step_tokens,
        engine.context_tokens,
        engine.layout.block_tokens,
        engine.stats().num_free_blocks,
        config.max_running,
        can_be_given=True,
    )


def _warm_up(engine: Engine, seconds: float) -> None:
    room = _room(engine)
    if fits(trial := warm_up(room), room):
        _run(engine, trial, time.monotonic() + seconds)


def _run(engine: Engine, trial: Trial, give_up_s: float) -> Sequence[StepResult]:
    """Runs one trial; returns its steps."""
    blocks = range(trial.num_given // engine.layout.block_tokens)
    nothing = bytes(engine.layout.block_bytes if blocks else 0)
    for request in trial_requests(trial, "", engine.checkpoint.model_config.vocab_size):
        engine.add(request, order=RestoreOrder(len(blocks), 0, lambda *_: None) if blocks else None)
        for block in blocks:
            if time.monotonic() > give_up_s:
                break
            engine.load_block(request.request_id, block, nothing)
        engine.note_loaded(request.request_id, blocks)
    results = []
    while engine.has_work() and time.monotonic() <= give_up_s:
        results.append(engine.step())
    engine.cancel_all()
    engine.forget_prefixes()  # the next trial computes all of its prompts
    return results


def note_steps(profile: Profile, trial: Trial, results: Sequence[StepResult]) -> None:
    """Adds the steps of a trial to the profile. Prefills count only when a single prompt was computed.

    A decode worker's trials begin with prefills, too: it may have to restore a request alone. Decode steps of a trial
    compute the same: one that takes much longer than most of them has a pause of the machine in it.
    """
    for result in results:
        if result.num_prefill_tokens and not result.num_decode_seqs and trial.num_sequences == 1:
            sample = prefill_sample(result.num_prefill_tokens, result.num_prefill_pairs, result.duration_s)
            profile.prefills.append(sample)
    decodes = [result for result in results if result.num_decode_seqs and not result.num_prefill_tokens]
    usual_s = median_low([result.duration_s for result in decodes] or [0.0])
    for result in decodes:
        if result.duration_s <= _PAUSE * usual_s:
            profile.steps.append(StepSample(result.num_decode_rows, result.decode_context_tokens, result.duration_s))


def load_profile(file: Path, kind: str) -> Profile | None:
    """Loads a profile; None if the file is missing, unreadable, of another kind or lacks something."""
    try:
        stored: Mapping[str, Any] = json.loads(file.read_text())
        if stored["kind"] != kind:
            return None
        prefills = [PrefillSample(*map(float, sample.values())) for sample in stored["prefill"]]
        steps = [StepSample(*map(float, sample.values())) for sample in stored["step"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile.unreadable", extra={"file": str(file), "reason": str(error)})
        return None
    profile = Profile(kind, prefills, steps)
    return None if missing_of(profile) else profile


def keep_profile(file: Path, profile: Profile, described: Mapping[str, Any], layout: KVLayout, num_blocks: int) -> None:
    """Writes the format that `sim.latency_sources.measured_profile` reads.

    If the directory cannot be written, only the next start is slower.
    """
    stored = {
        "kind": profile.kind,
        **described,
        "kv_tokens": num_blocks * layout.block_tokens,
        "kv_bytes_per_token": layout.block_bytes / layout.block_tokens,
        "prefill": [sample._asdict() for sample in profile.prefills],
        "step": [sample._asdict() for sample in profile.steps],
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, json.dumps(stored, indent=1).encode())
    except OSError as error:
        log.warning("profile.not_kept", extra={"file": str(file), "reason": str(error)})
