"""Known models have the weights, active weights and KV that their authors publish."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from halfmoon.architectures.weight_format import BFLOAT16
from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.expert_load import KNOTS, expert_loads
from halfmoon.sim.latency_sources.hardware import DEVICES
from halfmoon.sim.latency_sources.model_catalogue import MODELS, known_shape, model_shape
from halfmoon.sim.latency_sources.model_shape import ModelShape
from halfmoon.sim.latency_sources.roofline import Efficiency, Roofline


def num_params(shape: ModelShape) -> float:
    return replace(shape, weights=BFLOAT16).weight_bytes / 2


def active_params(shape: ModelShape) -> float:
    """Weights that one token needs, as model cards count: with the embedding, and its chosen experts."""
    num_idle = 0 if shape.experts is None else shape.experts.num_experts - shape.experts.num_chosen
    return num_params(shape) - shape.num_mixtures * num_idle * shape.expert_params


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),  # Jiang et al., 2024
        ("mixtral-8x22b", 141, 39),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen2-57b-a14b", 57.4, 14),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v2-lite", 15.7, 2.66),  # published without the embedding: 2.4
        ("deepseek-v2", 236, 21),
        ("deepseek-v3", 671, 37),
        ("gemma-2-2b", 2.61, 2.61),
        ("gemma-2-9b", 9.24, 9.24),
        ("gemma-2-27b", 27.2, 27.2),
        ("phi-3-mini", 3.8, 3.8),
        ("phi-4", 14.7, 14.7),
    ],
)
def test_weights_are_those_published(name: str, billions: float, active: float) -> None:
    shape = MODELS[name]
    assert num_params(shape) / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_params(shape) / 1e9 == pytest.approx(active, rel=0.025)


def test_latents_are_cached_once_whatever_the_heads_and_ranks() -> None:
    shape = MODELS["deepseek-v3"]
    assert shape.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert shape.device_kv_bytes_per_token(8, 1) == shape.device_kv_bytes_per_token(1, 1) == shape.kv_bytes_per_token
    assert MODELS["mixtral-8x7b"].device_kv_bytes_per_token(8, 1) == 32 * 2 * 128 * 2


@pytest.mark.parametrize(("gpu", "fits"), [("h200", True), ("h100", False), ("b200", True)])
def test_deepseek_v3_fits_eight_h200_and_not_eight_h100(gpu: str, fits: bool) -> None:
    source = Roofline(MODELS["deepseek-v3"])
    if fits:
        assert source.model(gpu, 8, 1).kv_tokens > 100_000
        return
    with pytest.raises(InvalidRequest, match=r"does not fit on 8 x h100: .* it fits on 16 \(TP8 x PP2\)"):
        source.model(gpu, 8, 1)
    assert source.model(gpu, 8, 2).kv_tokens > 0


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    uniform = {one.num_tokens: one for one in expert_loads(8, 2, 1, 0.0)}
    assert uniform[1].num_read == 2
    assert uniform[4].num_read == pytest.approx(8 * (1 - 0.75**4), rel=0.1)
    assert uniform[1024].num_read == 8
    assert [one.num_products for one in uniform.values()] == [2 * tokens for tokens in KNOTS]
    skewed = {one.num_tokens: one for one in expert_loads(128, 8, 1, 1.0)}
    even = {one.num_tokens: one for one in expert_loads(128, 8, 1, 0.0)}
    assert skewed[16].num_read < even[16].num_read


def test_the_busiest_rank_has_more_than_its_share_and_more_so_with_skew() -> None:
    even, skewed = ({one.num_tokens: one for one in expert_loads(256, 8, 8, skew)} for skew in (0.0, 1.0))
    for tokens in (1, 16, 1024):
        assert even[tokens].num_products >= tokens * 8 / 8
    share = 1024 * 8 / 8
    assert even[1024].num_products < 1.1 * share
    assert skewed[1024].num_products > 1.3 * share


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_longer_steps_take_longer_and_tokens_in_them_less(name: str) -> None:
    model = Roofline(MODELS[name]).model("h200", 8, 1)
    seconds = [model.stage_s(tokens, 0, 0, 0) for tokens in range(1, 5000, 7)]
    assert seconds == sorted(seconds)
    each = [one / tokens for one, tokens in zip(seconds, range(1, 5000, 7), strict=True)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(each))


def test_a_single_sequence_reads_active_weights_only() -> None:
    shape, gpu = MODELS["mixtral-8x7b"], DEVICES["h200"]
    step = Roofline(shape).model("h200", 1, 1).cycle(1)
    memory = gpu.memory_bytes_per_s * Efficiency().memory
    read_bytes = 2 * (active_params(shape) - shape.head_params)  # the embedding is looked up
    assert step.base_s == pytest.approx(read_bytes / memory + Efficiency().step_s, rel=1e-3)


@pytest.mark.parametrize(("mark", "share"), [("fp8", 0.5), ("awq", 0.26), ("int8", 0.5), ("q6_k", 0.41)])
def test_a_format_after_the_name_shrinks_the_weights(mark: str, share: float) -> None:
    plain, smaller = model_shape("llama-3-70b"), model_shape(f"meta-llama/Llama-3-70B-Instruct+{mark}")
    assert smaller.weight_bytes / plain.weight_bytes == pytest.approx(share, abs=0.025)
    assert num_params(smaller) == num_params(plain)
    faster = Roofline(smaller).model("h100", 4, 1).cycle(1).base_s / Roofline(plain).model("h100", 4, 1).cycle(1).base_s
    assert share < faster < 1


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown format 'int9'; known are bfloat16, fp8"):
        model_shape("llama-3-8b+int9")
    assert known_shape("nothing+awq") is None


def test_products_in_fp8_are_faster_where_the_device_has_them() -> None:
    plain, rounded = (Roofline(model_shape(f"llama-3-8b{mark}")) for mark in ("", "+fp8"))
    for gpu, ratio in (("h100", 2.0), ("a100-80g", 1.0)):
        long_s = [source.model(gpu, 1, 1).prefill[-1].model.b for source in (plain, rounded)]
        assert long_s[0] / long_s[1] == pytest.approx(ratio, rel=0.1)
