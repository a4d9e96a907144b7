"""Laws of the roofline: what more devices, more tokens and better hardware may and may not do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.hardware import DEVICES, device
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.model_catalogue import MODELS, model_shape
from halfmoon.sim.latency_sources.roofline import OF_2023, Efficiency, Roofline, kv_capacity_tokens

LLAMA = Roofline(MODELS["llama-3-8b"])
TENSORS = st.sampled_from([1, 2, 4, 8])


@given(TENSORS, st.integers(1, 16384), st.integers(0, 16384))
def test_cached_tokens_cost_attention_only(tensor: int, new: int, cached: int) -> None:
    model = LLAMA.model("h100", tensor, 1)
    extra_s = model.prefill_s(new, cached) - model.prefill_s(new)
    assert extra_s >= 0
    assert extra_s <= model.prefill_s(new + cached) - model.prefill_s(new) + 1e-9


@given(TENSORS, st.integers(1, 256), st.integers(1, 4000))
def test_a_step_is_never_faster_than_reading_weights_and_kv(tensor: int, batch: int, context: int) -> None:
    gpu, shape = DEVICES["h100"], LLAMA.shape
    num_bytes = shape.layer_params * shape.weights.bytes_per_weight + batch * context * shape.kv_bytes_per_token
    model = LLAMA.model("h100", tensor, 1)
    cycle = model.cycle(batch)
    assert (
        cycle.base_s - model.launch_s + cycle.slope_s * batch * context >= num_bytes / tensor / gpu.memory_bytes_per_s
    )


@pytest.mark.parametrize("gpu", ["h100", "a100-80g", "h200"])
def test_more_devices_have_more_room_and_shorter_long_prompts(gpu: str) -> None:
    models = [LLAMA.model(gpu, tensor, 1) for tensor in (1, 2, 4, 8)]
    assert [model.num_devices for model in models] == [1, 2, 4, 8]
    kv_tokens = [model.kv_tokens for model in models]
    assert kv_tokens == sorted(set(kv_tokens))
    long_s = [model.prefill_s(8192) for model in models]
    assert long_s == sorted(long_s, reverse=True)


def test_pipeline_stages_share_the_layers_and_add_their_hops() -> None:
    whole, halves = LLAMA.model("h100", 1, 1), LLAMA.model("h100", 1, 2)
    assert halves.num_stages == 2
    new, pairs = 2048, 2048**2 / 2
    assert halves.stage_s(new, pairs, 0, 0) == pytest.approx(whole.stage_s(new, pairs, 0, 0) / 2, rel=0.1)
    assert halves.prefill_s(new) > whole.prefill_s(new)


def test_engines_of_2023_lose_more_the_more_devices_exchange() -> None:
    old = Roofline(LLAMA.shape, OF_2023)
    lost_s = [old.model("h100", n, 1).prefill_s(512) - LLAMA.model("h100", n, 1).prefill_s(512) for n in (1, 2, 4)]
    assert lost_s[0] == pytest.approx(0.0)
    assert lost_s[1] == pytest.approx(2 * LLAMA.shape.num_layers * (100e-6 - 12e-6))
    assert lost_s[2] == pytest.approx(lost_s[1])


def test_the_capacity_is_what_memory_leaves() -> None:
    shape, gpu = model_shape("llama-2-70b"), device("a100-80g")
    assert kv_capacity_tokens(shape, gpu, 1, 1, Efficiency()) < 0
    tokens = kv_capacity_tokens(shape, gpu, 8, 1, Efficiency())
    used = tokens * shape.device_kv_bytes_per_token(8, 1) + shape.device_weight_bytes(8, 1)
    assert used <= gpu.memory_bytes * Efficiency().kv_memory


@pytest.mark.parametrize(
    ("gpu", "tensor", "says"),
    [
        (None, 1, "name a gpu for each group"),
        ("abacus", 1, "known are a100-80g, h100"),
        ("l40s", 3, "llama-3-8b: "),
    ],
)
def test_what_cannot_be_says_why(gpu: str | None, tensor: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        LLAMA.model(gpu, tensor, 1)
    with pytest.raises(InvalidRequest, match=r"does not fit on 2 x l40s: its weights alone are"):
        Roofline(MODELS["llama-3-70b"]).model("l40s", 2, 1)


@pytest.mark.parametrize("mark", ["+int8-kv", "+fp8-kv"])
def test_quantised_kv_takes_a_byte_a_value_and_two_a_row(mark: str) -> None:
    plain, rounded = (latency_source(f"roofline:llama-3-8b{suffix}").model("h100", 1, 1) for suffix in ("", mark))
    assert plain.kv_bytes_per_token / rounded.kv_bytes_per_token == pytest.approx(256 / 130)
    assert rounded.kv_tokens / plain.kv_tokens == pytest.approx(256 / 130, rel=1e-4)
