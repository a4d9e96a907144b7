"""A worker measures itself before it joins, once."""

from __future__ import annotations

import json
import math
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Barrier, get_ident
from types import SimpleNamespace

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization
from halfmoon.engine.config import EngineConfig, OffloadConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.step_result import StepResult
from halfmoon.ledger.models import ProfileRow
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel, StepSample
from halfmoon.sim.latency_sources.measured_profile import read_profile
from halfmoon.worker.engine_host import OwnHost
from halfmoon.worker.membership import calibration
from halfmoon.worker.membership.calibration import (
    Profile,
    calibrated,
    device_name,
    kind_of,
    kind_text,
    load_profile,
    measure,
    note_steps,
)
from halfmoon.worker.membership.trials import Trial, TrialRoom, trials


@pytest.fixture
def engine(tiny: Checkpoint) -> Engine:
    return Engine(tiny, EngineConfig(num_blocks=64, block_tokens=8, max_batch_tokens=80, max_running=8, num_threads=1))


ROLES = pytest.mark.parametrize("role", ["prefill", "decode", "both"])


@ROLES
def test_each_role_measures_what_it_does(engine: Engine, role: str) -> None:
    profile = measure(engine, role, "k", 60)
    assert any(profile.prefill_model)
    assert any(profile.step_model), "its role may change"
    assert max(one.batch for one in profile.steps) == 4  # sixteen do not fit
    if role != "decode":
        assert {one.new_tokens for one in profile.prefills} >= {10, 40, 80}
    else:
        assert {one.new_tokens for one in profile.prefills} == {10, 64, 80}, "the prompts of its decode steps"


@ROLES
def test_attention_is_measured_behind_kv_that_nobody_computed(
    engine: Engine, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_PAUSE", math.inf)  # no step is left out, however long it took here
    profile = measure(engine, role, "k", 60)
    (behind,) = (one for one in profile.prefills if one.cached_tokens)
    assert behind[:2] == (10, 256), "a power of two, as room for 493 tokens is left"
    assert max(one.context_tokens for one in profile.steps if one.batch == 1) == 256 + 10 + 8
    assert max(one.new_tokens for one in profile.prefills) <= 80


def test_a_dear_attention_is_seen_in_a_few_measurements() -> None:
    """Ten times the usual share of a step and of a prompt, a twentieth off each time."""
    prefill, step = PrefillModel(0.006, 5e-4, 2.5e-7), StepModel(0.009, 5e-4, 1.4e-6)
    prompts, decodes = ((64, 0), (512, 0), (64, 4096)), ((1, 65), (4, 132), (1, 4161), (16, 272))
    prefills = [PrefillSample(*at, prefill.seconds(*at) * (1 + (-1) ** index / 20)) for index, at in enumerate(prompts)]
    steps = [StepSample(*at, step.seconds(*at) * (1 + (-1) ** index / 20)) for index, at in enumerate(decodes)]
    profile = Profile("k", prefills, steps)
    assert profile.prefill_model.seconds(64, 16000) == pytest.approx(prefill.seconds(64, 16000), rel=0.2)
    assert profile.step_model.seconds(16, 64000) == pytest.approx(step.seconds(16, 64000), rel=0.2)


@ROLES
@pytest.mark.parametrize("dearness", [0.3, 1, 10])
def test_nothing_is_free_whichever_trial_is_the_last(role: str, dearness: float) -> None:
    """Of a worker of which time ends after any trial; attention may be much dearer than usual."""
    prefill, step = PrefillModel(0.02, 1e-3, dearness * 1e-7), StepModel(0.02, 1e-3, dearness * 2e-7)
    room = TrialRoom(512, 8192, 64, 1000, 64, can_be_given=True)
    profile = Profile("k")
    for number, trial in enumerate(trials(room, role)):
        num_new = trial.num_prompt_tokens - trial.num_given
        if trial.num_sequences == 1:
            profile.prefills.append(PrefillSample(num_new, trial.num_given, prefill.seconds(num_new, trial.num_given)))
        context = trial.num_sequences * trial.num_prompt_tokens
        profile.steps += [StepSample(trial.num_sequences, context, step.seconds(trial.num_sequences, context))] * (
            trial.num_steps
        )
        assert profile.prefill_model.b > 0
        if len(profile.prefills) > 1:
            assert profile.prefill_model.seconds(512) == pytest.approx(prefill.seconds(512), rel=0.3)
        assert profile.step_model.e > 0
        if number > 2:
            assert profile.step_model.seconds(16, 1024) == pytest.approx(step.seconds(16, 1024), rel=0.15)


def test_pauses_of_the_machine_are_no_steps() -> None:
    profile = Profile("k")
    durations_s = (0.02, 0.021, 0.5, 0.019, 0.02)
    results = [StepResult(num_prefill_tokens=64, num_prefill_pairs=2048.0, duration_s=0.5)]
    results += [StepResult(num_decode_seqs=1, decode_context_tokens=64, duration_s=one) for one in durations_s]
    note_steps(profile, Trial(1, 64, 5), results)
    assert [one.seconds for one in profile.steps] == [0.02, 0.021, 0.019, 0.02]
    assert [one.new_tokens for one in profile.prefills] == [64], "of which there is but one"
    note_steps(profile, Trial(1, 64), [])
    assert len(profile.steps) == 4


@ROLES
@pytest.mark.parametrize("num_looks", range(0, 80, 3))
def test_time_may_end_anywhere(engine: Engine, monkeypatch: pytest.MonkeyPatch, role: str, num_looks: int) -> None:
    """A clock that runs a second a look: blocks are not given after the end, and the engine is left as it was."""
    seconds, given, real, before = count(), list[float](), Engine.load_block, engine.stats()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))

    def load_block(engine: Engine, request_id: str, block: int, payload: bytes) -> None:
        given.append(float(next(seconds)))
        real(engine, request_id, block, payload)

    monkeypatch.setattr(Engine, "load_block", load_block)
    monkeypatch.setattr(calibration, "_warm_up", lambda *_: None)
    measure(engine, role, "k", num_looks)
    assert all(at_s <= num_looks + 1 for at_s in given)
    assert engine.stats() == before
    engine.check_integrity()


ENGINES = {
    "codes": EngineConfig(kv_dtype="int8"),
    "on the host": EngineConfig(offload=OffloadConfig(1 << 20)),
    "stages": EngineConfig(pipeline_parallel=2),
    "no prefixes": EngineConfig(prefix_cache=False),
}


@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_every_kind_of_engine_can_be_given_kv(tiny: Checkpoint, config: EngineConfig) -> None:
    engine = Engine(tiny, replace(config, num_blocks=72, block_tokens=8, max_batch_tokens=80, num_threads=1))
    try:
        profile = measure(engine, "decode", "k", 60)
        assert max(one.cached_tokens for one in profile.prefills) == 256
        engine.check_integrity()
    finally:
        engine.close()


@ROLES
@pytest.mark.parametrize("context_tokens", [13, 64, 100, 128])
def test_short_contexts_have_room_for_both_models(tiny: Checkpoint, role: str, context_tokens: int) -> None:
    engine = Engine(tiny, EngineConfig(num_blocks=8, max_context_tokens=context_tokens, num_threads=1))
    profile = measure(engine, role, "k", 60)
    assert any(profile.prefill_model)
    assert any(profile.step_model)
    assert max(one.new_tokens for one in profile.prefills) > min(context_tokens / 2, context_tokens - 10)


def test_chunks_follow_targets_once_both_models_are_known(tiny: Checkpoint) -> None:
    """Unless their length is named."""
    sampled = Profile("k", [PrefillSample(64, 0, 0.1)], [StepSample(1, 64, 0.02)])
    for chunk_tokens, profile, follows in (
        (None, sampled, True),
        (32, sampled, False),
        (None, Profile("k", sampled.prefills), False),
        (None, None, False),
    ):
        config = EngineConfig(num_blocks=64, block_tokens=8, max_running=8, num_threads=1, chunk_tokens=chunk_tokens)
        host = OwnHost(Engine(tiny, config), profile)
        assert host.facts.follows_targets == follows
        assert host.facts.chunk_tokens == (chunk_tokens or 128)


def test_the_engine_is_left_as_it_was(engine: Engine) -> None:
    before = engine.stats()
    measure(engine, "both", "k", 60)
    assert engine.stats() == before
    engine.check_integrity()
    engine.add(EngineRequest("r", tuple(range(3, 20)), SamplingParams(max_tokens=1)))
    assert engine.step().evicted_keys == ()


def test_it_takes_no_longer_than_it_may(engine: Engine) -> None:
    profile = measure(engine, "both", "k", 0.0)
    assert (profile.prefills, profile.steps) == ([], [])
    assert engine.stats().num_running == 0


@ROLES
def test_a_slow_worker_knows_both_models(engine: Engine, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """A clock that runs a second a look, and so about a second a step: one step for a short prompt, one decodes."""
    seconds = count()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    profile = measure(engine, role, "k", 3)
    assert any(profile.prefill_model)
    assert any(profile.step_model)


def test_a_profile_that_lacks_something_is_named_and_made_anew(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(engine, "both", "auto", 60, tmp_path)
    (file,) = (tmp_path / "profiles").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": []}))
    anew = calibrated(engine, "both", "auto", 0.0, tmp_path)
    assert anew is not None
    assert (anew.prefills, anew.steps) == ([], [])
    assert "worker.calibrated_in_part" in [record.message for record in caplog.records]
    anew = calibrated(engine, "both", "auto", 60, tmp_path)
    assert anew is not None
    assert anew.steps


@ROLES
def test_a_room_for_nothing_is_none_for_a_warm_up(tiny: Checkpoint, role: str, tmp_path: Path) -> None:
    engine = Engine(tiny, EngineConfig(num_blocks=1, block_tokens=8, max_context_tokens=8, num_threads=1))
    profile = calibrated(engine, role, "auto", 60, tmp_path)
    assert profile is not None
    assert (profile.prefills, profile.steps) == ([], [])


def test_of_workers_of_one_kind_one_measures_for_all(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three that find nothing at first."""
    all_looked, have_looked, measured = Barrier(3, timeout=60), set[int](), list[Profile]()

    def load_once_all_looked(file: Path, kind: str) -> Profile | None:
        found = load_profile(file, kind)
        if get_ident() not in have_looked:
            have_looked.add(get_ident())
            all_looked.wait()
        return found

    def counted_measure(engine: Engine, role: str, kind: str, seconds: float) -> Profile:
        measured.append(measure(engine, role, kind, seconds))
        return measured[-1]

    monkeypatch.setattr(calibration, "load_profile", load_once_all_looked)
    monkeypatch.setattr(calibration, "measure", counted_measure)
    config = EngineConfig(num_blocks=64, block_tokens=8, max_batch_tokens=80, max_running=8, num_threads=1)
    engines = [Engine(tiny, config) for _ in range(3)]
    with ThreadPoolExecutor(3) as workers:
        profiles = list(workers.map(lambda engine: calibrated(engine, "both", "auto", 60, tmp_path), engines))
    assert len(measured) == 1
    assert profiles == [measured[0]] * 3


def test_a_restart_measures_nothing(engine: Engine, tmp_path: Path) -> None:
    first = calibrated(engine, "both", "auto", 60, tmp_path)
    again = calibrated(engine, "both", "auto", 0.0, tmp_path)
    assert first is not None
    assert again is not None
    assert again.prefill_model == pytest.approx(first.prefill_model)
    assert again.step_model == pytest.approx(first.step_model)
    assert calibrated(engine, "both", "never", 60, tmp_path) is None
    (file,) = (tmp_path / "profiles").iterdir()
    read_profile(file)  # the simulator takes it as it is
    other = calibrated(engine, "both", "always", 60, tmp_path)
    assert other is not None
    assert other.prefills != first.prefills


def test_other_weights_have_profiles_of_their_own(tiny: Checkpoint) -> None:
    names: tuple[Quantization, ...] = ("auto", "none")
    config = EngineConfig(dtype="float32", num_blocks=4)
    assert len({kind_of(Engine(replace(tiny, quantization=name), config), "both") for name in names}) == 2


def test_a_kind_fits_into_the_ledger() -> None:
    """However long the options are, and no two alike."""
    kinds = [kind_text("both", "x" * length) for length in range(200, 400)]
    assert len(set(kinds)) == len(kinds)
    assert max(map(len, kinds)) == ProfileRow.__table__.c.kind.type.length  # type: ignore[attr-defined]
    assert kind_text("both", "x").startswith("both, x, halfmoon ")


def test_what_changes_speed_or_room_has_profiles_of_its_own(tiny: Checkpoint) -> None:
    config = EngineConfig(dtype="float32", num_blocks=64, num_threads=1)
    others = (
        replace(config, max_running=3),
        replace(config, num_blocks=2),
        replace(config, speculation="ngram"),
        replace(config, cuda_graphs=False),
    )
    assert len({kind_of(Engine(tiny, one), "both") for one in (config, *others)}) == 1 + len(others)
    assert kind_of(Engine(tiny, config), "both") == kind_of(Engine(tiny, replace(config, num_blocks=65)), "both")
    contexts = [Engine(tiny, replace(config, max_context_tokens=length)) for length in (64, 128)]
    assert kind_of(contexts[0], "both") != kind_of(contexts[1], "both")


def test_other_kernels_have_profiles_of_their_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kind_of(engine, "both")
    monkeypatch.setattr(calibration, "sources_digest", lambda: "another")
    assert kind_of(engine, "both") != before


def test_processors_that_share_a_name_have_profiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(described: str) -> str:
        monkeypatch.setattr(calibration, "processor", lambda: described)
        return device_name("cpu")

    names = [named(f"x86_64\nmodel name\t: AMD EPYC\nflags\t\t: {flags}") for flags in ("avx2", "avx2 avx512f")]
    assert len(set(names)) == 2
    assert all(name.startswith("cpu AMD EPYC ") for name in names)
    assert named("aarch64\nCPU part\t: 0xd40").startswith(f"cpu {platform.machine()} ")


@pytest.mark.parametrize("content", ["", "[]", '{"kind": "another"}', '{"prefill": 3}'])
def test_a_file_that_is_no_profile_is_made_anew(engine: Engine, tmp_path: Path, content: str) -> None:
    calibrated(engine, "decode", "auto", 60, tmp_path)
    (file,) = (tmp_path / "profiles").iterdir()
    file.write_text(content)
    profile = calibrated(engine, "decode", "auto", 60, tmp_path)
    assert profile is not None
    assert json.loads(file.read_text())["kind"] == kind_of(engine, "decode")


def test_a_directory_that_cannot_be_written_is_no_reason_to_fail(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("in the way")
    assert calibrated(engine, "decode", "auto", 60, tmp_path) is not None
    assert "profile.not_kept" in [record.message for record in caplog.records]
