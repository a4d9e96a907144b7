"""An engine's promises: the same tokens alone, batched, cut, preempted and handed over; no block is ever lost."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput
from halfmoon.engine.sampler import ERROR_TOKEN_ID, SampledToken
from halfmoon.errors import Incompatible, InvalidRequest, NoCapacity, NotFound

MakeEngine = Callable[..., Engine]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(name: str = "a", length: int = 20, max_tokens: int = 12, **options: Any) -> EngineRequest:
    fields = {key: options.pop(key) for key in ("output_token_ids", "prefill_only", "priority") if key in options}
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **options})
    return EngineRequest(name, prompt(length, length), sampling, **fields)


def finish(engine: Engine) -> list[TokenOutput]:
    """All outputs until no work is left, with the books checked after every step."""
    outputs: list[TokenOutput] = []
    for _ in range(500):
        if not engine.has_work():
            return outputs
        outputs += engine.step().outputs
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: Iterable[TokenOutput], name: str = "a") -> list[int]:
    return [output.token_id for output in outputs if output.request_id == name]


def generate(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    for one in requests:
        engine.add(one)
    outputs = finish(engine)
    return {one.request_id: tokens(outputs, one.request_id) for one in requests}


def requests() -> list[EngineRequest]:
    return [request(f"r{length}", length, max_tokens=14) for length in (1, 7, 8, 19, 33, 40)]


@pytest.fixture
def expected(make_engine: MakeEngine) -> dict[str, list[int]]:
    """Each request alone."""
    found: dict[str, list[int]] = {}
    for one in requests():
        found |= generate(make_engine(prefix_cache=False), one)
    return found


def test_tokens_are_those_of_transformers(
    expected: dict[str, list[int]],
    tiny_checkpoint: Callable[[str], Checkpoint],
    reference: Callable[[Checkpoint], Any],
) -> None:
    model = reference(tiny_checkpoint("llama"))
    for one in requests():
        ids = torch.tensor([one.prompt_token_ids])
        with torch.no_grad():
            for _ in range(14):
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(dim=-1)), dim=1)
        assert expected[one.request_id] == ids[0, len(one.prompt_token_ids) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"max_batch_tokens": 9, "chunk_tokens": 3},
        {"max_batch_tokens": 16, "chunk_tokens": 1, "max_running": 2},
        {"block_tokens": 3, "num_blocks": 200},
        {"num_blocks": 9},
    ],
    ids=["batched", "no cache", "small chunks", "two at a time", "odd blocks", "preempted"],
)
def test_tokens_do_not_depend_on_the_company(
    options: dict[str, Any], expected: dict[str, list[int]], make_engine: MakeEngine
) -> None:
    engine = make_engine(**options)
    assert generate(engine, *requests()) == expected
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_preemption_happens_and_is_counted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8)
    for name in ("a", "b"):
        engine.add(request(name, 24, max_tokens=30))
    results = []
    while engine.has_work():
        results.append(engine.step())
    assert sum(result.num_preempted for result in results) > 0
    outputs = [output for result in results for output in result.outputs]
    assert tokens(outputs, "a") == tokens(outputs, "b")
    assert [output.position for output in outputs if output.request_id == "b"] == list(range(30))


@pytest.mark.parametrize("num_moved", [1, 7])
def test_a_request_goes_on_on_another_engine(
    num_moved: int, expected: dict[str, list[int]], make_engine: MakeEngine
) -> None:
    source, target = make_engine(), make_engine(num_blocks=40)
    for one in requests():
        before = tuple(expected[one.request_id][: num_moved - 1])
        moved = replace(one, output_token_ids=before)
        source.add(replace(moved, prefill_only=True))
        (first,) = finish(source)
        assert first.position == num_moved - 1
        num_tokens = len(one.prompt_token_ids) + num_moved - 1
        target.reserve(moved)
        for layer in range(3):
            for start in range(0, num_tokens, 16):
                part = (layer, layer + 1, start, min(16, num_tokens - start))
                target.kv_write(one.request_id, *part, source.kv_read(one.request_id, *part))
        source.release(one.request_id)
        target.start(one.request_id, first.token_id)
        rest = finish(target)
        assert rest[0].position == num_moved
        assert [*before, first.token_id, *tokens(rest, one.request_id)] == expected[one.request_id]
    for engine in (source, target):
        assert engine.stats().num_free_blocks == engine.num_blocks


def test_continued_elsewhere_from_tokens_alone(expected: dict[str, list[int]], make_engine: MakeEngine) -> None:
    one = replace(requests()[3], output_token_ids=tuple(expected["r19"][:5]))
    make = make_engine()
    make.add(one)
    outputs = finish(make)
    assert [output.position for output in outputs] == list(range(5, 14))
    assert tokens(outputs, "r19") == expected["r19"][5:]


def test_a_known_prefix_is_not_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    alone = generate(make_engine(prefix_cache=False), request("a", 33))
    engine.add(request("a", 33))
    first = engine.step()
    assert first.num_prefill_tokens == 33
    assert set(first.num_cached_tokens.values()) == {0}
    finish(engine)
    assert engine.stats().num_cached_blocks == (33 + 12 - 1) // 8
    engine.add(request("b", 33))
    second = engine.step()
    assert second.num_prefill_tokens == 1
    assert second.num_cached_tokens == {"b": 32}
    outputs = [*second.outputs, *finish(engine)]
    assert tokens(outputs, "b") == alone["a"]


def test_sampling_is_reproducible_whatever_the_batch(make_engine: MakeEngine) -> None:
    drawn = [request(f"s{seed}", 9 + seed, temperature=1.0, seed=seed, top_p=0.95) for seed in range(5)]
    alone: dict[str, list[int]] = {}
    for one in drawn:
        alone |= generate(make_engine(), one)
    assert generate(make_engine(max_batch_tokens=12, chunk_tokens=5), *drawn[::-1]) == alone
    other_seed = replace(drawn[0], sampling=replace(drawn[0].sampling, seed=99))
    assert generate(make_engine(), other_seed)["s0"] != alone["s0"]


class TestEnds:
    def test_length(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request(max_tokens=3))
        assert [output.finish_reason for output in finish(engine)] == [None, None, "length"]

    def test_stop_token_is_emitted_and_ends(self, make_engine: MakeEngine) -> None:
        full = generate(make_engine(), request())["a"]
        stop = next(token for token in full if full.index(token) >= 4)
        engine = make_engine()
        engine.add(request(stop_token_ids=(stop,)))
        outputs = finish(engine)
        assert tokens(outputs) == full[: full.index(stop) + 1]
        assert outputs[-1].finish_reason == "stop"

    def test_eos_ends_unless_ignored(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request(ignore_eos=False, logit_bias={2: 100.0}))
        assert [(output.token_id, output.finish_reason) for output in finish(engine)] == [(2, "stop")]
        engine.add(request(ignore_eos=True, logit_bias={2: 100.0}, max_tokens=2))
        assert [output.finish_reason for output in finish(engine)] == [None, "length"]

    def test_min_tokens_hold_eos_back(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request(ignore_eos=False, logit_bias={2: 100.0}, min_tokens=3))
        outputs = finish(engine)
        assert [output.token_id == 2 for output in outputs] == [False, False, False, True]

    def test_prefill_only_that_ends_at_once_still_holds_its_kv(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request(prefill_only=True, max_tokens=1))
        (output,) = finish(engine)
        assert output.finish_reason == "length"
        assert engine.stats().num_held == 1
        assert len(engine.kv_read("a", 0, 3, 0, 20)) == 20 * engine.layout.token_bytes
        engine.release("a")
        assert engine.stats().num_free_blocks == engine.num_blocks


class TestRefusals:
    @pytest.mark.parametrize(
        ("bad", "param"),
        [
            (EngineRequest("a", (), SamplingParams(max_tokens=1)), "prompt"),
            (EngineRequest("a", (5, 199), SamplingParams(max_tokens=1)), "prompt"),
            (EngineRequest("a", (-1,), SamplingParams(max_tokens=1)), "prompt"),
            (EngineRequest("a", (5,), SamplingParams(max_tokens=0)), "max_tokens"),
            (EngineRequest("a", (5,), SamplingParams(max_tokens=512)), "max_tokens"),
            (EngineRequest("a", (5,), SamplingParams(max_tokens=500)), "max_tokens"),
            (EngineRequest("a", (5,), SamplingParams(max_tokens=2), output_token_ids=(1, 1)), "max_tokens"),
            (EngineRequest("a", (5,), SamplingParams(max_tokens=9), output_token_ids=(999,)), "output_token_ids"),
            (EngineRequest("a", (5,), SamplingParams(max_tokens=9, logit_bias={999: 1.0})), "logit_bias"),
            (request(logit_bias={5: math.inf}), "logit_bias"),
            (request(stop_token_ids=(199,), min_tokens=1), "stop_token_ids"),
            (request(temperature=math.nan), "temperature"),
            (request(temperature=-1.0), "temperature"),
            (request(top_p=1.5), "top_p"),
            (request(min_p=math.inf), "min_p"),
            (request(presence_penalty=math.nan), "presence_penalty"),
            (request(frequency_penalty=1e30), "frequency_penalty"),
            (request(repetition_penalty=1e-40), "repetition_penalty"),
            (request(num_top_logprobs=-1), "num_top_logprobs"),
        ],
    )
    def test_what_can_never_run(self, bad: EngineRequest, param: str, make_engine: MakeEngine) -> None:
        engine = make_engine(num_blocks=60)
        for method in (engine.add, engine.reserve):
            with pytest.raises(InvalidRequest) as caught:
                method(bad)
            assert caught.value.param == param
        assert not engine.has_work()

    def test_a_second_request_of_the_same_name(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request())
        with pytest.raises(InvalidRequest, match="here already"):
            engine.reserve(request())

    def test_no_room_for_a_reservation(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_blocks=5)
        engine.reserve(request("a", 20))
        with pytest.raises(NoCapacity) as caught:
            engine.reserve(request("b", 20))
        assert caught.value.retry_after_ms is not None
        assert caught.value.retry_after_ms > 0
        engine.cancel("a")
        engine.reserve(request("b", 20))

    def test_kv_of_the_wrong_size_or_place(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.reserve(request())
        with pytest.raises(InvalidRequest, match="bytes"):
            engine.kv_write("a", 0, 3, 0, 20, b"1234")
        with pytest.raises(InvalidRequest, match="layers"):
            engine.kv_write("a", 0, 4, 0, 20, b"1234")
        with pytest.raises(InvalidRequest, match="tokens"):
            engine.kv_write("a", 0, 3, 20, 20, b"1234")

    def test_kv_out_of_turn(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request())
        for call in (
            lambda: engine.kv_write("a", 0, 3, 0, 20, b""),
            lambda: engine.kv_read("a", 0, 3, 0, 20),
            lambda: engine.kv_read("nobody", 0, 3, 0, 20),
            lambda: engine.start("a", 5),
            lambda: engine.release("a"),
        ):
            with pytest.raises(NotFound):
                call()

    def test_a_first_token_that_ends_the_request(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.reserve(request(ignore_eos=False))
        with pytest.raises(InvalidRequest, match="ends the request"):
            engine.start("a", 2)
        assert engine.stats().num_free_blocks == engine.num_blocks

    def test_no_memory_for_one_block(self, make_engine: MakeEngine) -> None:
        with pytest.raises(Incompatible, match="does not hold one block"):
            make_engine(num_blocks=None, kv_memory_bytes=100)

    def test_nonsense_limits(self) -> None:
        with pytest.raises(Incompatible, match="max_batch_tokens"):
            EngineConfig(max_batch_tokens=64, max_running=64)


def test_cancel_frees_every_block_in_any_state(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, max_running=3)
    engine.add(request("held", 20, prefill_only=True))
    engine.step()
    engine.reserve(request("reserved", 20))
    engine.add(request("running", 20))
    engine.step()
    engine.add(request("partial", 40, priority=1))
    engine.add(request("waiting", 40, priority=2))
    stats = engine.stats()
    assert (stats.num_held, stats.num_reserved, stats.num_running, stats.num_waiting) == (1, 1, 1, 2)
    assert stats.num_free_blocks < 20
    for name in ("held", "reserved", "running", "partial", "waiting"):
        assert engine.cancel(name)
        assert not engine.cancel(name)
        engine.check_integrity()
    assert engine.stats().num_free_blocks == 20
    assert not engine.has_work()
    assert engine.step().is_empty


def test_a_failure_ends_its_requests_and_not_the_engine(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = generate(make_engine(), request("later"))
    engine.add(request("a"))
    engine.add(request("b", 30))
    engine.step()

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", broken)
        outputs = engine.step().outputs
    assert {(o.request_id, o.token_id, o.position, o.finish_reason) for o in outputs} == {
        ("a", ERROR_TOKEN_ID, 1, "error"),
        ("b", ERROR_TOKEN_ID, 1, "error"),
    }
    assert engine.stats().num_free_blocks == engine.num_blocks
    assert generate(engine, request("later")) == expected


def test_kv_goes_in_while_others_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    alone = generate(make_engine(), request("a", 20, max_tokens=40))
    engine.add(request("a", 20, max_tokens=40))
    engine.reserve(request("b", 30))
    payload = bytes(30 * engine.layout.token_bytes)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            engine.kv_write("b", 0, 3, 0, 30, payload)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        outputs = finish(engine)
    finally:
        stop.set()
        writer.join()
    assert tokens(outputs) == alone["a"]


def test_step_results_count(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("a", 20))
    result = engine.step()
    assert (result.num_prefill_tokens, result.num_decode_seqs, result.context_tokens) == (20, 0, 20)
    engine.add(request("b", 8))
    result = engine.step()
    assert (result.num_prefill_tokens, result.num_decode_seqs, result.context_tokens) == (8, 1, 21 + 8)
    assert result.duration_s > 0


def test_a_token_that_cannot_be_drawn_ends_its_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = generate(make_engine(), request("good"))
    run = engine._runner.run

    def one_broken(scheduled: Any, watch: Any) -> list[SampledToken]:
        tokens = run(scheduled, watch)
        return [
            SampledToken(ERROR_TOKEN_ID) if item.sequence.request_id == "bad" else token
            for item, token in zip(scheduled, tokens, strict=True)
        ]

    monkeypatch.setattr(engine._runner, "run", one_broken)
    engine.add(request("bad"))
    engine.add(request("good"))
    outputs = finish(engine)
    assert [(o.token_id, o.position, o.finish_reason) for o in outputs if o.request_id == "bad"] == [
        (ERROR_TOKEN_ID, 0, "error")
    ]
    assert tokens(outputs, "good") == expected["good"]
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_the_context_is_what_the_memory_holds(make_engine: MakeEngine) -> None:
    assert make_engine(num_blocks=5).context_tokens == 40
    assert make_engine(num_blocks=500).context_tokens == 512
    engine = make_engine(num_blocks=3)
    engine.add(request(length=20, max_tokens=300, prefill_only=True))  # only the prompt has to fit here
    assert len(finish(engine)) == 1


def test_max_context_tokens_caps_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine(max_context_tokens=30)
    assert engine.context_tokens == 30
    with pytest.raises(InvalidRequest, match="context of 30 tokens"):
        engine.add(request("a", 20, max_tokens=11))


def test_a_configuration_alone_runs_with_dummy_weights(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoint("opt").path / "config.json", tmp_path)
    checkpoint = prepare_checkpoint(str(tmp_path))
    config = EngineConfig(dtype="float32", num_blocks=4, weights="dummy")
    assert generate(Engine(checkpoint, config), request()) == generate(Engine(checkpoint, config), request())
    with pytest.raises(Incompatible, match=r"lacks \d+ tensors"):
        Engine(checkpoint, replace(config, weights="checkpoint"))


@pytest.mark.parametrize("model", ["qwen3", "opt-norm-after", "mistral"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_every_dtype_runs(model: str, dtype: str, make_engine: MakeEngine) -> None:
    engine = make_engine(model, dtype=dtype, chunk_tokens=4)
    assert len(generate(engine, request("a", 30), request("b", 9))["a"]) == 12
    assert engine.layout.dtype in ("float32", "bfloat16") if dtype == "auto" else engine.layout.dtype == dtype


def test_a_copy_under_way_ends_before_its_blocks_are_freed(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=6)
    engine.reserve(request("moving", 36))
    payload = bytes(36 * engine.layout.token_bytes)
    stopped: list[Exception] = []

    def write() -> None:
        try:
            while True:
                engine.kv_write("moving", 0, 3, 0, 36, payload)
        except NotFound as error:
            stopped.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert engine.cancel("moving")
    alone = generate(make_engine(), request("next", 30))
    assert generate(engine, request("next", 30)) == alone
    writer.join()
    assert len(stopped) == 1
