"""An engine whose KV lies on the host for the most part gives the tokens of one that has it all at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from halfmoon.engine.config import EngineConfig, OffloadConfig, OffloadOverlap, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.request import EngineRequest, TokenOutput
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.policy.offload.recompute import Kind, OffloadCosts, Recompute
from tests.engine.engine_runs import MakeEngine, finish, generate, request, tokens

SCHEDULES: tuple[OffloadSchedule, ...] = ("latency", "throughput")
NEVER = Recompute(1.0, 1e9)
FREE = Recompute(0.5, 0.1)
COSTS: dict[Kind, OffloadCosts] = {
    "load": OffloadCosts(1.0, 0.0, None, NEVER),
    "inputs": OffloadCosts(1.0, 0.0, FREE, Recompute(0.0, 5.0)),
    "tokens": OffloadCosts(1.0, 0.0, None, Recompute(0.0, 1.0)),
}


def some() -> list[EngineRequest]:
    return [request(f"r{length}", length, max_tokens=8) for length in (7, 19, 33, 40)]


@pytest.fixture
def make_offloading(make_engine: MakeEngine) -> Callable[..., Engine]:
    """With room for few blocks on the device, and several groups' worth of sequences on the host."""

    def make(model: str, schedule: OffloadSchedule = "latency", kind: Kind | None = None, **options: Any) -> Engine:
        host_bytes = options.pop("host_bytes", 1 << 20)
        offload = OffloadConfig(
            host_bytes=host_bytes, schedule=schedule, recompute="never" if kind == "load" else "auto"
        )
        settings: dict[str, Any] = {"num_blocks": 16, "max_context_tokens": 56, "attention": "sdpa"}
        engine = make_engine(model, offload=offload, **{**settings, **options})
        if kind is not None:
            runner_of(engine).chooser.use(COSTS[kind], learns=False)
        return engine

    return make


def generate_counting(engine: Engine, num_staged: Counter[str]) -> dict[str, list[int]]:
    outputs: list[TokenOutput] = []
    for one in some():
        engine.add(one)
    while engine.has_work():
        result = engine.step()
        outputs += result.outputs
        num_staged.update(result.staged.num_groups)
    engine.check_integrity()
    return {one.request_id: tokens(outputs, one.request_id) for one in some()}


def runner_of(engine: Engine) -> OffloadRunner:
    assert isinstance(engine._runner, OffloadRunner)
    return engine._runner


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("overlap", ["layers", "layer", "none"])
def test_neither_buffers_nor_what_is_computed_again_change_tokens(
    make_engine: MakeEngine, overlap: OffloadOverlap, recompute: Literal["never", "always"], schedule: OffloadSchedule
) -> None:
    expected = generate(make_engine("opt"), *some())
    offload = OffloadConfig(1 << 20, schedule, recompute, overlap=overlap)
    engine = make_engine("opt", offload=offload, num_blocks=16, max_context_tokens=56, attention="sdpa")
    num_staged: Counter[str] = Counter()
    assert generate_counting(engine, num_staged) == expected
    assert (num_staged["inputs"] > num_staged["load"]) == (recompute == "always")


def test_a_model_without_small_inputs_is_not_always_computed_again(make_engine: MakeEngine) -> None:
    offload = OffloadConfig(1 << 20, recompute="always")
    with pytest.raises(Incompatible, match="inputs have 64 numbers a token, K and V only 64: take auto or never"):
        make_engine("llama", offload=offload, num_blocks=16, max_context_tokens=56, attention="sdpa")


def test_ranks_that_load_everything_always_do() -> None:
    with pytest.raises(Incompatible, match="leave out --offload-recompute always"):
        EngineConfig(tensor_parallel=2, offload=OffloadConfig(1 << 20, recompute="always"))


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


def handed_over(prefill: Engine, decode: Engine, one: EngineRequest) -> int:
    """The request's first token; its KV is in the decode engine, where it has begun."""
    prefill.add(replace(one, prefill_only=True))
    first = finish(prefill)[0].token_id
    num_layers, num_tokens = prefill.layout.num_layers, len(one.prompt_token_ids)
    payload = prefill.kv_read(one.request_id, KVSlice(0, num_layers, 0, num_tokens))
    decode.reserve(one)
    decode.kv_write(one.request_id, KVSlice(0, num_layers, 0, num_tokens), payload)
    decode.start(one.request_id, first)
    prefill.cancel(one.request_id)
    return first


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_of_handed_over_kv_are_made_up_for(
    make_engine: MakeEngine, make_offloading: MakeEngine, schedule: OffloadSchedule
) -> None:
    some_long = [request(name, length, max_tokens=16) for name, length in (("a", 33), ("b", 40))]
    expected = generate(make_engine("opt"), *some_long)
    prefill = make_offloading("opt", kind="inputs")  # what it keeps as inputs is handed over as K and V
    decode = make_offloading("opt", schedule, kind="inputs")
    decode.add(request("filler", 24, max_tokens=30))  # takes what there is on the device
    decode.step()
    firsts = {one.request_id: handed_over(prefill, decode, one) for one in some_long}
    free = [decode.stats().num_free_blocks]
    outputs: list[TokenOutput] = []
    num_staged: Counter[str] = Counter()
    for _ in range(10):
        result = decode.step()
        outputs += result.outputs
        num_staged.update(result.staged.num_groups)
        decode.check_integrity()
        free.append(decode.stats().num_free_blocks)
    assert num_staged["inputs"] > 5
    assert max(free) > free[0]  # though the sequences have grown
    outputs += finish(decode)
    for name, first in firsts.items():
        assert [first, *tokens(outputs, name)] == expected[name]
    assert decode.stats().num_free_blocks == decode.num_blocks
    prefill.close()
    decode.close()


def test_inputs_that_pay_no_more_become_kv_again(make_engine: MakeEngine, make_offloading: MakeEngine) -> None:
    [one] = some_long = [request("a", 40, max_tokens=14)]
    expected = generate(make_engine("opt"), *some_long)
    engine = make_offloading("opt", kind="inputs", num_blocks=10)
    engine.add(one)
    outputs: list[TokenOutput] = []
    kinds: list[set[str]] = []
    while engine.has_work():
        if len(outputs) == 4:
            runner_of(engine).chooser.use(OffloadCosts(1.0, 0.0, Recompute(0.5, 500.0), NEVER), learns=False)
        result = engine.step()
        outputs += result.outputs
        kinds.append(set(result.staged.num_groups))
    assert tokens(outputs) == expected["a"]
    assert {"inputs"} in kinds
    assert kinds[-1] == {"load"}
    engine.close()


def test_host_memory_holds_more_tokens_as_inputs(make_offloading: MakeEngine) -> None:
    num_used = {}
    for kind in ("load", "inputs"):
        engine = make_offloading("opt", kind=kind)
        for length in (46, 47, 48):
            engine.add(request(f"r{length}", length, max_tokens=8))
        while engine.step().num_prefill_tokens:
            continue
        num_used[kind] = engine.num_blocks - engine.stats().num_free_blocks
        engine.close()
    assert num_used["inputs"] <= num_used["load"] - 3  # seven blocks of inputs


@pytest.mark.parametrize("kind", ["load", "inputs", "tokens"])
def test_a_host_that_is_full_preempts(make_engine: MakeEngine, make_offloading: MakeEngine, kind: Kind) -> None:
    many = [request(f"r{length}", length, max_tokens=14) for length in (17, 19, 33, 40)]
    expected = generate(make_engine("opt"), *many)
    block_bytes = 8 * 3 * 2 * 64 * 4
    engine = make_offloading("opt", kind=kind, host_bytes=7 * block_bytes)
    for one in many:
        engine.add(one)
    outputs: list[TokenOutput] = []
    num_preempted = 0
    while engine.has_work():
        result = engine.step()
        outputs += result.outputs
        num_preempted += result.num_preempted
        engine.check_integrity()
    assert num_preempted > 0
    assert {one.request_id: tokens(outputs, one.request_id) for one in many} == expected
    assert engine.stats().num_free_blocks == engine.num_blocks
    engine.close()


def test_too_small_a_budget_is_refused(make_offloading: MakeEngine) -> None:
    with pytest.raises(Incompatible, match="has to fit twice"):
        make_offloading("opt", num_blocks=2)
    for ranks in ("pipeline_parallel", "sequence_parallel"):
        with pytest.raises(Incompatible, match="not for stages of layers, or ranks that share tokens"):
            make_offloading("opt", **{ranks: 2})
    with pytest.raises(Incompatible, match="leave out --offload-kv or --kv-dtype"):
        make_offloading("opt", kv_dtype="int8")


def test_inputs_are_kept_only_where_they_are_smaller(
    make_offloading: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make_offloading("llama").close()
    [record] = [record for record in caplog.records if record.message == "offload.inputs_not_kept"]
    assert "64 numbers a token, K and V only 64" in record.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_log_probabilities_of_prompts_and_no_embeddings(
    make_engine: MakeEngine, make_offloading: Callable[..., Engine], schedule: OffloadSchedule
) -> None:
    def found(engine: Engine) -> dict[str, list[float]]:
        for one in some():
            engine.add(replace(one, sampling=replace(one.sampling, num_prompt_logprobs=0)))
        outputs = finish(engine)
        return {one.request_id: [row.logprob for row in one.prompt_logprobs] for one in outputs if one.prompt_logprobs}

    engine = make_offloading("llama", schedule)
    ours, expected = found(engine), found(make_engine("llama"))
    assert ours.keys() == expected.keys() == {one.request_id for one in some()}
    for name, logprobs in expected.items():
        assert ours[name] == pytest.approx(logprobs, abs=1e-4)
    with pytest.raises(InvalidRequest, match="KV on the host"):
        engine.add(request(pooling="last"))
