"""The choice of weights and KV is the best there is: by trying them all; more memory and faster links never hurt."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from halfmoon.errors import Incompatible
from halfmoon.policy.offload.host_choice import (
    Demand,
    HostChoice,
    Memory,
    ModelSizes,
    Objective,
    Rates,
    choose_host_share,
    staging_bytes_of,
)
from halfmoon.policy.offload.recompute import OffloadCosts, Recompute, layer_time

NEVER = Recompute(0.0, float("inf"))
seconds = st.floats(1e-6, 1e-2)
plain_costs = st.builds(
    OffloadCosts, seconds, seconds, st.none(), st.just(NEVER), st.floats(0, 1e-4)
)  # everything is loaded
costs_with_again = st.builds(
    lambda load_s, base_s, of_inputs, of_tokens: OffloadCosts(
        load_s, base_s, Recompute(load_s / 2, of_inputs), Recompute(0.0, of_tokens)
    ),
    *(seconds, seconds, seconds, seconds),
)


def quarters(least: float, most: float) -> st.SearchStrategy[float]:
    """Bytes whose sums and products are exact: what just fits does so however it is reckoned."""
    return st.integers(int(4 * least), int(4 * most)).map(lambda number: number / 4)


sizes = st.builds(ModelSizes, st.integers(1, 7), quarters(1, 50), quarters(0, 50), quarters(0.25, 5), st.integers(1, 3))
memories = st.builds(
    lambda device, host, kv: Memory(device, host, min(host, kv)), *(quarters(10, 800),) * 2, quarters(0, 800)
)
demands = st.builds(Demand, st.integers(2, 12), st.integers(1, 4))
objectives = st.sampled_from(["latency", "throughput"])


def rates_of(costs: st.SearchStrategy[OffloadCosts]) -> st.SearchStrategy[Rates]:
    return st.builds(Rates, costs, seconds, seconds, st.floats(0, 1e-4))


def chosen(
    rates: Rates, of: ModelSizes, memory: Memory, demand: Demand, objective: Objective = "throughput"
) -> HostChoice | None:
    try:
        return choose_host_share(rates, of, memory, demand, objective)
    except Incompatible:
        return None


def fastest_of_all(rates: Rates, of: ModelSizes, memory: Memory, demand: Demand, objective: Objective) -> float:
    """Most tokens a second over every layer count, batch, device token and token computed again; 0: nothing fits."""
    best = 0.0
    batches = range(1, (demand.max_batch if objective == "throughput" else 1) + 1)
    for layers, batch in product(range(of.num_layers + 1), batches):
        context_tokens = -(-demand.context_tokens // of.block_tokens) * of.block_tokens
        num_tokens = batch * context_tokens
        weights = of.other_bytes + (of.num_layers - layers + (2 if layers else 0)) * of.layer_bytes
        streamed_s = rates.layer_load_s * (layers if layers > 2 else 0) / of.num_layers
        base_s = rates.costs.base_s + rates.row_s * (batch - 1) + rates.context_s * num_tokens
        costs = replace(rates.costs, weights_s=streamed_s, base_s=base_s)
        block_bytes = of.block_tokens * of.token_bytes
        free = (memory.device_bytes - weights) // block_bytes * block_bytes
        staging = max(staging_bytes_of(rates, of, context_tokens), free / 4)
        for on_device in range(of.block_tokens, num_tokens + 1, of.block_tokens):
            on_host = num_tokens - on_device
            host_kv = on_host * of.token_bytes
            if on_device * of.token_bytes + (staging if on_host else 0.0) > free or host_kv > memory.host_kv_bytes:
                continue
            if layers * of.layer_bytes + host_kv > memory.host_bytes:
                continue
            splits = [(0, 0), *((0, n) for n in range(1, on_host + 1))]
            if costs.inputs is not None:
                splits += [(n, 0) for n in range(1, on_host + 1)]
            step_s = min(layer_time(costs, on_host, of.num_layers, *split) for split in splits) * of.num_layers
            best = max(best, batch / step_s)
    return best


@given(rates_of(plain_costs), sizes, memories, demands, objectives)
def test_no_other_choice_is_faster(
    rates: Rates, of: ModelSizes, memory: Memory, demand: Demand, objective: Objective
) -> None:
    best = fastest_of_all(rates, of, memory, demand, objective)
    choice = chosen(rates, of, memory, demand, objective)
    assert (choice is None) == (best == 0.0)
    if choice is not None:
        assert choice.tokens_per_s == pytest.approx(best)


@given(rates_of(costs_with_again), sizes, memories, demands, objectives)
def test_with_recomputing_none_is_faster_by_more_than_the_split_ignores(
    rates: Rates, of: ModelSizes, memory: Memory, demand: Demand, objective: Objective
) -> None:
    """A split that gains less than 15 % counts as noise (`choose_split`)."""
    best = fastest_of_all(rates, of, memory, demand, objective)
    choice = chosen(rates, of, memory, demand, objective)
    assert (choice is None) == (best == 0.0)
    if choice is not None:
        assert best * 0.85 * (1 - 1e-9) <= choice.tokens_per_s <= best * (1 + 1e-9)


@given(rates_of(plain_costs), sizes, memories, demands, objectives, st.floats(1, 3), st.integers(0, 2))
def test_more_memory_and_faster_links_never_hurt(
    rates: Rates, of: ModelSizes, memory: Memory, demand: Demand, objective: Objective, factor: float, what: int
) -> None:
    before = chosen(rates, of, memory, demand, objective)
    assume(before is not None)
    assert before is not None
    if what == 0:
        memory = memory._replace(device_bytes=memory.device_bytes * factor)
    elif what == 1:
        memory = memory._replace(host_bytes=memory.host_bytes * factor, host_kv_bytes=memory.host_kv_bytes * factor)
    else:
        costs = replace(rates.costs, load_s=rates.costs.load_s / factor)
        rates = rates._replace(costs=costs, layer_load_s=rates.layer_load_s / factor)
    after = choose_host_share(rates, of, memory, demand, objective)
    assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-9)


@given(rates_of(costs_with_again), sizes, memories, demands)
def test_what_is_chosen_fits(rates: Rates, of: ModelSizes, memory: Memory, demand: Demand) -> None:
    choice = chosen(rates, of, memory, demand)
    assume(choice is not None)
    assert choice is not None
    assert 0 <= choice.device_tokens + choice.host_tokens - choice.batch * demand.context_tokens < 3 * choice.batch
    device = of.device_bytes(choice.host_layers) + choice.device_tokens * of.token_bytes
    assert device <= memory.device_bytes * (1 + 1e-9)
    host_kv = choice.host_tokens * of.token_bytes
    assert host_kv <= memory.host_kv_bytes
    assert choice.host_layers * of.layer_bytes + host_kv <= memory.host_bytes
    assert round(choice.host_share * of.num_layers) == choice.host_layers
    assert choice.split.num_tokens <= choice.host_tokens


# an 8B model in bfloat16 on an H100 with PCIe 5, roughly: seconds, bytes
LARGE = ModelSizes(32, 436e6, 2.1e9, 131_072)
LINK_BYTES_PER_S = 45e9
ON_H100 = Rates(OffloadCosts(131_072 / 32 / LINK_BYTES_PER_S, 2e-4, None, NEVER), 436e6 / LINK_BYTES_PER_S, 5e-7, 1e-9)


def test_a_model_that_fits_stays_on_the_device() -> None:
    choice = choose_host_share(ON_H100, LARGE, Memory(70e9, 500e9, 100e9), Demand(8_192, 64), "throughput")
    assert (choice.host_layers, choice.host_share) == (0, 0.0)
    assert "the device holds all weights" not in choice.reason or choice.host_tokens == 0


def test_the_weights_that_do_not_fit_are_on_the_host_and_no_more() -> None:
    memory = Memory(8e9, 500e9, 0.0)
    choice = choose_host_share(ON_H100, LARGE, memory, Demand(8_192, 1), "latency")
    assert LARGE.device_bytes(choice.host_layers) + 8_192 * LARGE.token_bytes <= 8e9
    assert LARGE.device_bytes(choice.host_layers - 1) + 8_192 * LARGE.token_bytes > 8e9
    assert f"weights of {choice.host_layers} of 32 layers" in choice.reason
    assert "the link limits" in choice.reason
    assert choice.step_s == pytest.approx(choice.host_layers * ON_H100.layer_load_s)


def test_throughput_puts_kv_on_the_host_where_weights_cross_the_link_anyway() -> None:
    """FlexGen's point: each load of the weights serves as many sequences as memory holds."""
    memory, demand = Memory(8e9, 500e9, 200e9), Demand(2_048, 64)
    fast = choose_host_share(ON_H100, LARGE, memory, demand, "latency")
    many = choose_host_share(ON_H100, LARGE, memory, demand, "throughput")
    assert fast.batch == 1
    assert many.batch > 4
    assert many.tokens_per_s > 4 * fast.tokens_per_s
    assert many.step_s > fast.step_s


def test_a_given_share_is_kept() -> None:
    choice = choose_host_share(ON_H100, LARGE, Memory(70e9, 500e9, 0.0), Demand(2_048, 4), "throughput", [16])
    assert choice.host_share == 0.5


def test_what_fits_nowhere_is_refused_with_its_sizes() -> None:
    with pytest.raises(Incompatible, match=r"one sequence of 8192 tokens .* has 1073741824 bytes of KV") as raised:
        choose_host_share(ON_H100, LARGE, Memory(3.5e9, 500e9, 0.0), Demand(8_192, 1), "latency")
    assert raised.value.param == "offload_weights"
