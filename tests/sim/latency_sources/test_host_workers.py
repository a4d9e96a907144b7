"""Workers with KV or weights on the host: their room, and how long steps take that load some of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.policy.offload.host_choice import Demand
from halfmoon.policy.offload.recompute import OffloadCosts, Recompute, best_inputs
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, WorkerGroup
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.host_memory import HostMemory, Recomputed
from halfmoon.sim.latency_sources.host_workers import HostRoom, HostShare, chosen_weights, worker_model
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.model_catalogue import model_shape
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.named_workload import named_workload

SOURCE = Roofline(model_shape("llama-3-8b"))
HOST_BYTES = 64 << 30


def worker(host_bytes: int = HOST_BYTES, tensor: int = 1) -> LatencyModel:
    return worker_model(SOURCE, "h100", tensor, 1, 1, HostShare(host_bytes))


def test_host_memory_is_room_for_more_tokens_and_staging_takes_some_of_the_devices() -> None:
    plain, more = worker(0), worker()
    assert more.host is not None
    assert plain.host is None
    assert more.host.device_tokens == int(0.75 * plain.kv_tokens)
    on_host = more.kv_tokens - more.host.device_tokens
    assert on_host == int(HOST_BYTES // SOURCE.shape.kv_bytes_per_token)
    assert worker(tensor=2).kv_tokens > worker(0, tensor=2).kv_tokens


def test_steps_within_the_devices_memory_take_as_long_as_without_a_host() -> None:
    plain, more = worker(0), worker()
    assert more.cycle(8) == plain.cycle(8)
    assert more.prefill_s(2048) == plain.prefill_s(2048)


def test_what_the_device_does_not_hold_is_loaded_over_pcie() -> None:
    more = worker()
    assert more.host is not None
    tokens = more.host.device_tokens + 100_000
    loaded_s = 100_000 * SOURCE.shape.kv_bytes_per_token / (64e9 * SOURCE.efficiency.link)
    assert more.step_s(64, tokens) == pytest.approx(loaded_s, rel=0.1)
    assert more.step_s(64, tokens) > loaded_s
    two = worker(tensor=2)
    assert two.host is not None
    assert two.host.load_s == more.host.load_s / 2, "each device loads its heads over its own link"


hosts = st.builds(
    lambda device, load_s, layers, weights_s, part, again_s: HostMemory(
        device, load_s, layers, weights_s, None if again_s is None else Recomputed(load_s * part, again_s)
    ),
    st.floats(1, 1e5),
    st.floats(1e-9, 1e-5),
    st.integers(1, 80),
    st.sampled_from([0.0, 0.003, 0.5]),
    st.floats(0, 1),
    st.none() | st.floats(1e-9, 1e-5),
)


@given(hosts, st.floats(1e-4, 0.1), st.floats(0, 1e-6), st.floats(0, 1e6))
def test_pieces_of_cycles_are_the_times_of_steps(
    host: HostMemory, base_s: float, slope_s: float, context: float
) -> None:
    plain = replace(worker(0), step=(worker(0).step[0],), launch_s=0.0)
    model = replace(
        plain,
        step=(plain.step[0]._replace(model=plain.step[0].model._replace(d=base_s, e=0.0, f=slope_s)),),
        host=host,
    )
    expected_s = host.step_s(base_s + slope_s * context, context)
    assert model.step_s(1, context) == pytest.approx(expected_s, rel=1e-6)
    bend = model.bend_after(1, context)
    assert bend > context * (1 - 1e-9)
    if bend < 1e9:  # the same line up to there, and no jump
        line, following = model.cycle(1, context), model.cycle(1, bend)
        at_s = line.base_s + line.slope_s * bend
        assert at_s == pytest.approx(following.base_s + following.slope_s * bend, rel=1e-5)


@given(
    st.floats(1e-8, 1e-5), st.floats(1e-8, 1e-5), st.floats(1e-4, 0.1), st.integers(1, 20_000), st.integers(4, 80),
    st.sampled_from([0.0, 0.003, 0.5]),
)  # fmt: skip
def test_what_is_recomputed_is_what_an_engine_would(
    load_s: float, again_s: float, computed_s: float, num_tokens: int, num_layers: int, weights_s: float
) -> None:
    """The engine takes the mean of the first layer and the others; here a step also begins with a layer's load."""
    host = HostMemory(0.0, load_s, num_layers, weights_s, Recomputed(load_s / 2, again_s))
    of_inputs = Recompute(load_s / 2 / num_layers, again_s / num_layers)
    costs = OffloadCosts(load_s / num_layers, computed_s / num_layers, of_inputs, Recompute(0.0, 1e9))
    costs = replace(costs, weights_s=weights_s / num_layers)
    engine_s = num_layers * best_inputs(costs, num_tokens, num_layers).layer_s
    step_s = host.step_s(computed_s, num_tokens)
    assert engine_s * (1 - 2 / num_layers) <= step_s <= engine_s * (1 + 2 / num_layers)


def test_weights_on_the_host_make_room_and_steps_take_as_long_as_their_load() -> None:
    plain, more = worker(0), worker_model(SOURCE, "h100", 1, 1, 1, HostShare(weights=0.5))
    layer_bytes = SOURCE.shape.device_layer_bytes(1)
    freed = (more.kv_tokens - plain.kv_tokens) * SOURCE.shape.kv_bytes_per_token
    assert freed == pytest.approx(14 * layer_bytes, rel=1e-3), "16 of 32 layers, and two buffers"
    loaded_s = 16 * layer_bytes / (64e9 * SOURCE.efficiency.link)
    assert more.step_s(1, 1000) == pytest.approx(loaded_s)
    assert more.step_s(64, 100_000) == pytest.approx(loaded_s), "the same load serves more sequences"
    long = plain.prefill_s(100_000)
    assert more.prefill_s(100_000) == pytest.approx(long), "hidden behind a long prompt"
    assert more.cycle(8) != plain.cycle(8)
    two_layers = worker_model(SOURCE, "h100", 1, 1, 1, HostShare(weights=2 / 32))
    assert two_layers.step_s(1, 1000) == plain.step_s(1, 1000), "they stay in the buffers"


def test_opt_computes_some_kv_from_inputs_and_others_load_all() -> None:
    opt, llama = (
        worker_model(Roofline(model_shape(name)), "h100", 1, 1, 1, HostShare(HOST_BYTES))
        for name in ("opt-30b", "llama-3-8b")
    )
    assert opt.host is not None
    assert llama.host is not None
    assert llama.host.recomputed is None
    assert opt.host.recomputed is not None
    all_loaded = replace(opt, host=opt.host._replace(recomputed=None))
    tokens = opt.host.device_tokens + 20_000
    gain = all_loaded.step_s(8, tokens) / opt.step_s(8, tokens)
    assert 1.05 < gain < 2.0, "inputs are half of K and V"
    two = worker_model(Roofline(model_shape("opt-30b")), "h100", 2, 1, 1, HostShare(HOST_BYTES))
    assert two.host is not None
    assert two.host.recomputed is None, "several ranks load everything"


def test_the_share_of_weights_is_what_the_device_cannot_hold() -> None:
    large, demand = Roofline(model_shape("llama-3-70b")), Demand(4096, 32)
    with pytest.raises(InvalidRequest, match="does not fit on 1 x h100"):
        large.model("h100", 1, 1)
    room = HostRoom(0, 256 << 30)
    share = chosen_weights(large, "h100", 1, room, demand, "latency")

    def kv_tokens(share: float) -> int:
        try:
            return worker_model(large, "h100", 1, 1, 1, HostShare(weights=share)).kv_tokens
        except InvalidRequest:
            return 0

    assert kv_tokens(share) >= 4096 > kv_tokens(share - 1 / 80)
    assert chosen_weights(SOURCE, "h100", 1, room, demand, "latency") == 0.0
    with pytest.raises(InvalidRequest, match="llama-3-70b on 1 x h100: one sequence of 4096 tokens"):
        chosen_weights(large, "h100", 1, HostRoom(0, 8 << 30), demand, "latency")


@pytest.mark.parametrize(
    "changes",
    [{}, {"recomputed": Recomputed(5e-5, 3e-5)}, {"weights_s": 0.012}, {"weights_s": 0.02, "device_tokens": 700.0}],
    ids=["loaded", "recomputed", "weights", "more weights"],
)
def test_a_simulated_run_that_passes_the_bend_takes_as_long_as_its_steps(changes: dict[str, Any]) -> None:
    """One sequence grows from the device's memory onto the host while it decodes."""
    model = replace(worker(), kv_tokens=4096)
    assert model.host is not None
    host = model.host._replace(**{"device_tokens": 600.0, "load_s": 1e-4, **changes})
    model = replace(model, host=host)
    spec = ClusterSpec((WorkerGroup("both", 1, model, BatchLimits()),))
    result = simulate(spec, named_workload("in=512,out=257", 1.0, 1, "poisson", 1.0, 0), seed=0)
    steps_s = [model.step_s(1, 512 + number) for number in range(1, 257)]
    assert result.tpot_s[0] == pytest.approx(sum(steps_s) / 256, rel=0.01)
    assert steps_s[-1] > 1.3 * steps_s[0]


def test_what_a_worker_would_refuse_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not for TP1 x PP2"):
        worker_model(SOURCE, "h100", 1, 2, 1, HostShare(HOST_BYTES))
    with pytest.raises(InvalidRequest, match="a cpu computes in host memory"):
        worker_model(SOURCE, "cpu", 1, 1, 1, HostShare(HOST_BYTES))
    with pytest.raises(InvalidRequest, match="was not measured"):
        worker_model(DistServeCoefficients("opt-13b"), None, 1, 1, 1, HostShare(HOST_BYTES))
    with pytest.raises(InvalidRequest, match="in the model's dtype"):
        worker_model(Roofline(model_shape("llama-3-8b+int8-kv")), "h100", 1, 1, 1, HostShare(HOST_BYTES))
