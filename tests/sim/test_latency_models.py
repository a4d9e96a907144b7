"""Latency models: DistServe's figures, the roofline's laws, measured pieces, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.hardware import DEVICES
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.measured_profile import read_profile
from halfmoon.sim.latency_sources.model_catalogue import MODELS, model_shape
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.latency_sources.splitwise import read_splitwise


@pytest.mark.parametrize(("pp", "ttft_ms"), [(1, 75.2), (2, 78.2)])
def test_distserve_prompt_of_512_tokens(pp: int, ttft_ms: float) -> None:
    model = DistServeCoefficients("opt-13b").model("a100-80g", 1, pp)
    assert 1000 * model.prefill_s(512) == pytest.approx(ttft_ms, abs=0.05)


def test_distserve_decode_has_other_coefficients_for_large_batches() -> None:
    model = DistServeCoefficients("opt-13b").model(None, 1, 1)
    small = (19.934702624895458 + 0.0006269356524350583 * 94_000 + 0.03850697740828398 * 94) / 1000
    large = (7.1661889468253595 + 0.0005798000403396046 * 95_000 + 0.15831096191764046 * 95) / 1000
    assert model.stage_s(0, 0, 94, 94_000) == pytest.approx(small)
    assert model.stage_s(0, 0, 95, 95_000) == pytest.approx(large)


SIMPLE = LatencyModel(
    (PrefillPiece(0, PrefillModel(0.01, 1e-4, 1e-8)),),
    (StepPiece(0, StepModel(0.01, 1e-3, 1e-7)),),
    10_000,
    1.0,
    "test",
)


def test_a_mixed_step_reads_the_weights_once() -> None:
    alone = SIMPLE.stage_s(100, 5_000, 0, 0) + SIMPLE.stage_s(0, 0, 4, 2_000)
    mixed = SIMPLE.stage_s(100, 5_000, 4, 2_000)
    assert max(SIMPLE.stage_s(100, 5_000, 0, 0), SIMPLE.stage_s(0, 0, 4, 2_000)) < mixed < alone


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 9])
def test_pipelined_decode_is_bound_by_the_first_stage_or_by_the_passage(batch: int) -> None:
    model = replace(SIMPLE, num_stages=4, launch_s=0.002, fills_stages=True)
    base_s, slope_s = model.cycle(batch)
    groups = min(batch, 4)
    stage_s = 0.01 + 1e-3 * batch / groups + 1e-7 * 600 / groups
    passage_s = 4 * stage_s + 0.002
    first_stage_s = groups * (stage_s + 0.002)
    assert base_s + slope_s * 600 == pytest.approx(max(passage_s, first_stage_s))


def test_an_engine_that_waits_for_its_tokens_passes_the_whole_batch_through_all_stages() -> None:
    model = replace(SIMPLE, num_stages=4, launch_s=0.002)
    base_s, slope_s = model.cycle(8)
    assert base_s + slope_s * 600 == pytest.approx(4 * (0.01 + 8 * 1e-3 + 600 * 1e-7) + 0.002)


def test_the_policies_models_are_those_of_a_linear_worker() -> None:
    assert SIMPLE.policy_prefill == pytest.approx(PrefillModel(0.01, 1e-4, 1e-8))
    assert SIMPLE.policy_step == pytest.approx(StepModel(0.01, 1e-3, 1e-7))


@given(
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from(["llama-3-8b", "smollm2-135m"]),
    st.integers(1, 4096),
    st.integers(1, 4096),
)
def test_more_work_never_takes_less_on_a_roofline(gpu: str, name: str, few: int, more: int) -> None:
    model = Roofline(model_shape(name)).model(gpu, 1, 1)
    few, more = sorted((few, more))
    assert model.prefill_s(few) <= model.prefill_s(more) + 1e-12
    assert model.prefill_s(few, 100) >= model.prefill_s(few)
    assert model.stage_s(0, 0, few, 0) <= model.stage_s(0, 0, more, 0) + 1e-12


def test_a_prompt_on_a_roofline_by_hand() -> None:
    shape, gpu = MODELS["llama-3-8b"], DEVICES["h100"]
    model = Roofline(shape).model("h100", 1, 1)
    products_s = 4096 * 2 * (shape.layer_params + shape.head_params) / (0.6 * gpu.flops)
    attention_s = 4096**2 / 2 * 4 * 32 * 32 * 128 / (0.5 * gpu.flops)
    assert model.prefill_s(4096) == pytest.approx(products_s + attention_s + 2e-3)
    assert shape.weight_bytes == pytest.approx(16.06e9, rel=0.01)


def test_more_than_two_devices_without_a_link_of_their_own_share_the_hosts() -> None:
    shape, gpu = MODELS["llama-3-8b"], DEVICES["l40s"]
    rows_bytes = 4096 * 2 * shape.hidden * 2 * shape.num_layers  # of 4096 tokens, exchanged twice a layer
    times = {tp: Roofline(shape).model("l40s", tp, 1).prefill_s(4096) for tp in (2, 4)}
    exchanged = {2: 2 * 1 / 2 / (0.7 * gpu.link_bytes_per_s), 4: 2 * 3 / 4 / (0.7 * 22e9 / 4)}
    computed = {tp: times[tp] - 2e-3 - 64 * 12e-6 - rows_bytes * exchanged[tp] for tp in times}
    assert computed[2] == pytest.approx(2 * computed[4])
    assert times[4] > times[2]


@pytest.mark.parametrize("name", ["opt-13b", "opt-66b"])
def test_the_roofline_is_near_distserves_measurements(name: str) -> None:
    """One GPU more or less would be a factor of two; engines of 2024 lost more to tensor parallelism than it says."""
    tp = {"opt-13b": 1, "opt-66b": 4}[name]
    measured = DistServeCoefficients(name).model(None, tp, 1)
    modelled = Roofline(model_shape(name)).model("a100-80g", tp, 1)
    assert modelled.prefill_s(1024) == pytest.approx(measured.prefill_s(1024), rel=0.2)
    assert modelled.kv_tokens == pytest.approx(measured.kv_tokens, rel=0.2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("roofline:llama-3-8b@v100", "unknown hardware 'v100': known are a100-80g, h100"),
        ("roofline:llama-3-70b@l40s", "does not fit on 1 x l40s"),
        ("roofline:llama-3-8b", "name a gpu"),
        ("roofline:gpt-5@h100", "unknown model 'gpt-5': known are demo, .*opt-13b"),
        ("distserve:llama-3-8b", "it has opt-13b, opt-66b"),
        ("nothing", "not a latency source: give a profile"),
        ("none.json", "cannot be read"),
        ("none.csv:llama-2-70b", "not Splitwise's"),
        ("none.csv:llama-3-8b", "it has llama-2-70b"),
    ],
)
def test_what_is_not_known_is_told_with_what_is(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        latency_source(text).model(None, 1, 1)


@pytest.mark.parametrize(("tp", "pp", "says"), [(3, 1, "does not divide the model's 32"), (1, 33, "32 layers")])
def test_a_roofline_is_of_workers_that_would_start(tp: int, pp: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"llama-3-8b: .*{says}"):
        latency_source("roofline:llama-3-8b@h100").model(None, tp, pp)


@pytest.mark.parametrize(("gpu", "tp", "says"), [("h100", 1, "are of a100-80g"), (None, 3, "TPxPP.* 1x1, ")])
def test_distserve_knows_one_gpu_and_few_shapes(gpu: str | None, tp: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        DistServeCoefficients("opt-13b").model(gpu, tp, 1)


def profile(**changes: Any) -> dict[str, Any]:
    prefill = [
        {"new_tokens": new, "cached_tokens": cached, "seconds": 0.01 + 2e-4 * new + 1e-8 * new * (cached + new / 2)}
        for new in (64, 256, 1024)
        for cached in (0, 1024)
    ]
    step = [
        {"batch": batch, "context_tokens": batch * context, "seconds": 0.02 + 1e-3 * batch + 1e-7 * batch * context}
        for batch in (1, 4, 16)
        for context in (128, 1024)
    ]
    transfer = [{"num_bytes": size, "seconds": 0.001 + size / 1e9} for size in (1 << 20, 1 << 24)]
    return {
        "model": "demo",
        "device": "cpu",
        "kv_tokens": 4096,
        "kv_bytes_per_token": 100,
        "prefill": prefill,
        "step": step,
        "transfer": transfer,
        **changes,
    }


def test_a_profile_gives_back_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile()))
    found = read_profile(path)
    model = found.model(None, 1, 1)
    assert model.error == pytest.approx((0, 0), abs=1e-6)
    assert model.prefill_s(256, 1024) == pytest.approx(0.01 + 2e-4 * 256 + 1e-8 * 256 * (1024 + 128))
    assert model.stage_s(0, 0, 10, 3000) == pytest.approx(0.02 + 0.01 + 3e-4)
    assert found.link == pytest.approx((1e9, 0.001))


def test_held_out_points_judge_a_fit_to_the_others_and_are_used_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    bend = {"new_tokens": 512, "cached_tokens": 0, "seconds": 0.2, "is_held_out": True}
    path.write_text(json.dumps(profile(prefill=[*profile()["prefill"], bend])))
    model = read_profile(path).whole
    straight_s = 0.01 + 2e-4 * 512 + 1e-8 * 512 * 256
    assert model.error.prefill == pytest.approx((0.2 - straight_s) / 0.2)
    assert model.prefill_s(512) == pytest.approx(0.2, rel=0.02)


def test_a_gateway_that_serves_its_tokens_takes_some_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile(token_s=0.002)))
    found = read_profile(path)
    alone, served = found.whole, found.model(None, 1, 1)
    for batch in (1, 4, 16):
        assert served.stage_s(0, 0, batch, 1000) == pytest.approx(alone.stage_s(0, 0, batch, 1000) + 0.002)
    assert served.prefill_s(300) == alone.prefill_s(300)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prefill": []}, "wrong at prefill"),
        ({"step": [{"batch": 0, "context_tokens": 1, "seconds": 1}]}, "step.0.batch"),
        ({"kv_tokens": "many"}, "kv_tokens"),
    ],
)
def test_a_wrong_profile_says_where(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile(**changes)))
    with pytest.raises(InvalidRequest, match=says):
        read_profile(path)


def test_a_profile_is_of_one_kind_of_worker(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile()))
    with pytest.raises(InvalidRequest, match="TP1 x PP1"):
        read_profile(path).model(None, 2, 1)


def test_splitwise_rows_are_interpolated(tmp_path: Path) -> None:
    path = tmp_path / "perf_model.csv"
    header = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    rows = [
        f"llama2-70b,h100-80gb,{prompt},{batch},128,{prompt * batch / 10},{30 + batch},8"
        for prompt, batch in ((512, 1), (1024, 1), (2048, 1), (512, 4))
    ]
    path.write_text("\n".join([header, *rows]))
    model = read_splitwise(path, "llama-2-70b").model("h100", 8, 1)
    assert model.prefill_s(1536) == pytest.approx(0.1536)
    assert model.stage_s(0, 0, 2, 0) == pytest.approx(0.032)
    with pytest.raises(InvalidRequest, match="it has h100 TP8"):
        read_splitwise(path, "llama-2-70b").model("h100", 2, 1)


def test_a_modelled_workers_coefficients(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"prefill": [0.01, 1e-4, 1e-8], "step": [0.02, 1e-3, 1e-7], "kv_tokens": 5_000}))
    model = latency_source(str(path)).model(None, 1, 1)
    assert model.prefill_s(100) == pytest.approx(0.01 + 0.01 + 1e-8 * 5_000)
    assert model.stage_s(0, 0, 2, 100) == pytest.approx(0.02 + 2e-3 + 1e-5)
    assert model.kv_tokens == 5_000
    assert latency_source("llama3-8b-h100").model(None, 1, 1).kv_tokens == 400_000
    with pytest.raises(InvalidRequest, match="whole worker"):
        latency_source(str(path)).model(None, 2, 1)
