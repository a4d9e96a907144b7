"""An engine whose KV lies on the host for the most part gives the tokens of one that has it all at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon.engine.config import OffloadConfig, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.request import EngineRequest, TokenOutput
from halfmoon.errors import Incompatible
from halfmoon.policy.offload import Kind, OffloadCosts, Recompute
from tests.engine.test_engine import MakeEngine, finish, generate, request, tokens

SCHEDULES: tuple[OffloadSchedule, ...] = ("latency", "throughput")
NEVER = Recompute(1.0, 1e9)
FREE = Recompute(0.5, 0.1)
COSTS: dict[Kind, OffloadCosts] = {
    "load": OffloadCosts(1.0, 0.0, None, NEVER),
    "inputs": OffloadCosts(1.0, 0.0, FREE, NEVER),
    "tokens": OffloadCosts(1.0, 0.0, None, Recompute(0.0, 1.0)),
}


def some() -> list[EngineRequest]:
    return [request(f"r{length}", length, max_tokens=8) for length in (7, 19, 33, 40)]


@pytest.fixture
def make_offloading(make_engine: MakeEngine) -> Callable[..., Engine]:
    """With room for few blocks on the device, and several groups' worth of sequences on the host."""

    def make(model: str, schedule: OffloadSchedule = "latency", kind: Kind | None = None, **options: Any) -> Engine:
        offload = OffloadConfig(host_bytes=1 << 20, schedule=schedule, recompute="auto" if kind is None else "never")
        settings: dict[str, Any] = {"num_blocks": 16, "max_context_tokens": 56, "attention": "sdpa"}
        engine = make_engine(model, offload=offload, **{**settings, **options})
        if kind is not None:
            runner_of(engine).use(COSTS[kind])
        return engine

    return make


def generate_counting(engine: Engine, num_staged: Counter[str]) -> dict[str, list[int]]:
    outputs: list[TokenOutput] = []
    for one in some():
        engine.add(one)
    while engine.has_work():
        result = engine.step()
        outputs += result.outputs
        num_staged.update(result.num_staged)
    engine.check_integrity()
    return {one.request_id: tokens(outputs, one.request_id) for one in some()}


def runner_of(engine: Engine) -> OffloadRunner:
    assert isinstance(engine._runner, OffloadRunner)
    return engine._runner


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("opt", "load"), ("opt", "inputs"), ("opt", "tokens"), ("opt-norm-after", "inputs")),
        *(("llama", "load"), ("llama", "tokens")),
    ],
)
def test_the_tokens_are_those_of_an_engine_with_room(
    make_engine: MakeEngine, make_offloading: MakeEngine, model: str, kind: Kind, schedule: OffloadSchedule
) -> None:
    expected = generate(make_engine(model), *some())
    engine = make_offloading(model, schedule, kind)
    num_staged: Counter[str] = Counter()
    assert generate_counting(engine, num_staged) == expected
    assert num_staged[kind] > 5
    engine.close()


@pytest.mark.parametrize("attention", ["native", "sdpa"])
@pytest.mark.parametrize("model", ["opt", "llama"])
def test_with_measured_rates_too(
    make_engine: MakeEngine, make_offloading: MakeEngine, model: str, attention: str
) -> None:
    engine = make_offloading(model, attention=attention)
    num_staged: Counter[str] = Counter()
    expected = generate(make_engine(model, attention=attention), *some())
    assert generate_counting(engine, num_staged) == expected
    assert num_staged.total() > 5
    engine.close()


@pytest.mark.parametrize("kind", ["inputs", "tokens"])
def test_a_cached_prefix_on_the_host(make_engine: MakeEngine, make_offloading: MakeEngine, kind: Kind) -> None:
    again = [request("first", 40, max_tokens=3), request("second", 40, max_tokens=14)]
    roomy, engine = make_engine("opt"), make_offloading("opt", "throughput", kind)
    for one in again:
        assert generate(engine, one) == generate(roomy, one)
    engine.close()


def test_handed_over_kv_has_no_inputs_and_is_loaded(make_engine: MakeEngine, make_offloading: MakeEngine) -> None:
    whole = make_engine("opt")
    expected = generate(whole, request("a", 33))["a"]
    prefill = make_offloading("opt", kind="inputs")
    prefill.add(request("a", 33, prefill_only=True))
    first = finish(prefill)[0].token_id
    layers = prefill.layout.num_layers
    payload = prefill.kv_read("a", 0, layers, 0, 33)
    decode = make_offloading("opt", kind="inputs")
    decode.add(request("filler", 24, max_tokens=30))  # takes what there is on the device
    decode.step()
    decode.reserve(request("a", 33))
    decode.kv_write("a", 0, layers, 0, 33, payload)
    decode.start("a", first)
    assert [first, *tokens(finish(decode), "a")] == expected
    assert decode.stats().num_free_blocks == decode.num_blocks
    prefill.close()
    decode.close()


def test_too_small_a_budget_is_refused(make_offloading: MakeEngine) -> None:
    with pytest.raises(Incompatible, match="has to fit twice"):
        make_offloading("opt", num_blocks=2)
    with pytest.raises(Incompatible, match="one rank"):
        make_offloading("opt", tensor_parallel=2)


def test_inputs_are_kept_only_where_they_are_smaller(
    make_offloading: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make_offloading("llama").close()
    [record] = [record for record in caplog.records if record.message == "offload.inputs_not_kept"]
    assert "64 numbers a token, K and V only 64" in record.reason  # type: ignore[attr-defined]
