"""Weights on the host: the tokens of an engine with all of them at hand, and each layer loaded once a pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.config import EngineConfig, OffloadConfig, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_budget import device_weight_bytes, weight_bytes
from halfmoon.engine.models import build_model
from halfmoon.engine.offload.link import Copy, LinkWork
from halfmoon.engine.offload.weights import WeightStream, layers_on_host
from halfmoon.engine.request import EngineRequest, TokenOutput
from halfmoon.errors import Incompatible
from tests.engine.engine_runs import MakeEngine, generate, request, tokens


def some() -> list[EngineRequest]:
    return [request(f"r{length}", length, max_tokens=6) for length in (7, 19, 33)]


def stream_of(engine: Engine) -> WeightStream:
    assert engine._weights is not None
    return engine._weights


@pytest.mark.parametrize(("share", "dtype"), [(0.67, "float32"), (1.0, "float32"), (1.0, "bfloat16")])
@pytest.mark.parametrize("model", ["llama", "opt", "opt-norm-after", "gemma2", "mixtral", "deepseek-v2"])
def test_tokens_are_those_of_an_engine_with_all_weights(
    make_engine: MakeEngine, model: str, share: float, dtype: str
) -> None:
    expected = generate(make_engine(model, dtype=dtype), *some())
    assert generate(make_engine(model, dtype=dtype, host_weights=share), *some()) == expected


def test_a_step_loads_each_layer_once(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", host_weights=1.0)
    for one in some():
        engine.add(one)
    engine.step()
    first, later = engine.step().staged, engine.step().staged
    assert first.weight_bytes == later.weight_bytes > 0
    assert later.weight_bytes == _layers_bytes(engine)


def test_two_layers_stay_in_the_buffers(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", host_weights=0.67)
    generate(engine, *some())
    stream_of(engine).take_work()
    generate(engine, *some())
    assert stream_of(engine).take_work().num_bytes == 0


@pytest.mark.parametrize("schedule", ["throughput", "latency"])
def test_columns_load_weights_once_a_step_and_rows_once_for_each_group(
    make_engine: MakeEngine, schedule: OffloadSchedule
) -> None:
    """With KV on the host, too: a staging buffer holds one sequence."""
    requests = [request(f"r{number}", 40, max_tokens=4) for number in range(4)]
    expected = generate(make_engine("opt"), *requests)
    options: dict[str, Any] = {"num_blocks": 8, "max_context_tokens": 48}
    engine = make_engine("opt", host_weights=1.0, offload=OffloadConfig(1 << 20, schedule, "never"), **options)
    stream_of(engine).take_work()  # the first layer, fetched at start
    for one in requests:
        engine.add(one)
    outputs: list[TokenOutput] = []
    passes: dict[int, set[float]] = {}  # loaded in a step, by its groups
    while engine.has_work():
        result = engine.step()
        outputs += result.outputs
        if result.is_empty:
            continue
        num_groups = sum(result.staged.num_groups.values())
        passes.setdefault(num_groups, set()).add(result.staged.weight_bytes / _layers_bytes(engine))
    assert {one.request_id: tokens(outputs, one.request_id) for one in requests} == expected
    assert max(passes) > 2
    for num_groups, loaded in passes.items():
        assert loaded == {num_groups if schedule == "latency" and num_groups else 1}


def _layers_bytes(engine: Engine) -> int:
    """All layers are on the host."""
    return sum(one.source.nbytes for matrices in stream_of(engine)._matrices.values() for one in matrices)


class SlowLink:
    """Copies only when it is waited for, as late as a link may be."""

    def __init__(self) -> None:
        self.waiting: list[Sequence[Copy]] = []
        self.num_fetches = 0

    def fetch(self, copies: Sequence[Copy]) -> SlowLink:
        self.waiting.append(copies)
        self.num_fetches += 1
        return self

    def wait(self) -> None:
        for copies in self.waiting:
            for source, target in copies:
                target.copy_(source)
        self.waiting = []

    def take_work(self) -> LinkWork:
        return LinkWork()

    def close(self) -> None:
        """Nothing is to be ended."""


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=20))
def test_a_layer_multiplies_with_its_own_weights_in_any_order(num_layers: int, order: list[int]) -> None:
    """Passes may end early, and begin anywhere."""
    link = SlowLink()
    stream = WeightStream(frozenset(range(num_layers)), link, torch.device("cpu"), None)
    weights = [torch.full((3, 2), float(layer)) for layer in range(num_layers)]
    multiplies = [stream.pack_layer(lambda _: None, layer)(weight) for layer, weight in enumerate(weights)]
    stream.begin()
    for layer in (number % num_layers for number in order):
        multiply = multiplies[layer]
        assert multiply is not None
        assert torch.equal(multiply(torch.ones(1, 2), None), torch.full((1, 3), 2.0 * layer))


def test_passes_in_order_load_nothing_twice() -> None:
    link = SlowLink()
    stream = WeightStream(frozenset(range(4)), link, torch.device("cpu"), None)
    for layer in range(4):
        stream.pack_layer(lambda _: None, layer)(torch.zeros(2, 2))
    stream.begin()
    for _ in range(3):
        for layer in range(4):
            for _matrix in range(2):
                stream.take(layer)
    assert link.num_fetches == 3 * 4 + 1, "and the first layer of the next pass"


@given(st.integers(1, 100), st.floats(0, 1))
def test_layers_on_the_host_are_spread_evenly(num_layers: int, share: float) -> None:
    layers = sorted(layers_on_host(num_layers, share))
    assert len(layers) == round(share * num_layers)
    gaps = [after - before for before, after in pairwise(layers)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_device_holds_what_is_not_on_the_host_and_two_layers(make_engine: MakeEngine) -> None:
    config = make_engine("llama").checkpoint.model_config
    total = weight_bytes(config, torch.bfloat16)
    assert device_weight_bytes(config, torch.bfloat16, 0.0) == total
    all_on_host = device_weight_bytes(config, torch.bfloat16, 1.0)
    layer_bytes = total - all_on_host  # three layers less, and two buffers more
    assert 0 < layer_bytes < total / 3
    assert device_weight_bytes(config, torch.bfloat16, 0.67) == total


def test_what_latent_attention_absorbs_stays_on_the_device(make_engine: MakeEngine) -> None:
    config = make_engine("deepseek-v2").checkpoint.model_config
    parameters = build_model(config, torch.bfloat16, "meta").parameters()
    absorbed = [view.nbytes for name, view in parameters.items() if name.endswith("kv_b_proj.weight")]
    with_host, without = (device_weight_bytes(config, torch.bfloat16, share) for share in (1.0, 0.0))
    outside = sum(view.nbytes for name, view in parameters.items() if ".layers." not in name)
    assert len(absorbed) == config.num_layers
    assert outside + sum(absorbed) < with_host < without


def test_weights_that_cannot_be_copied_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(Incompatible, match="--offload-weights needs our CPU kernels"):
        make_engine("llama", host_weights=1.0, attention="sdpa", dtype="float32")
    with pytest.raises(Incompatible, match="from 0 to 1"):
        EngineConfig(host_weights=1.5)
