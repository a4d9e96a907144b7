"""How requests end on an engine, and which never begin: no block is ever lost."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from halfmoon.engine.config import EngineConfig
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.request import ERROR_TOKEN_ID, EngineRequest, SampledToken, SamplingParams
from halfmoon.errors import Incompatible, InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.pb import types_pb2 as pb
from tests.engine.engine_runs import MakeEngine, finish, generate, request, tokens


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
        assert len(engine.kv_read("a", KVSlice(0, 3, 0, 20))) == 20 * engine.layout.token_bytes
        engine.cancel("a")
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

    def test_the_least_repetition_penalty_is_allowed_as_it_is_sent(self, make_engine: MakeEngine) -> None:
        sent = pb.SamplingParams(max_tokens=1, repetition_penalty=0.01).repetition_penalty
        assert sent < 0.01
        make_engine().add(request(repetition_penalty=sent))

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
            engine.kv_write("a", KVSlice(0, 3, 0, 20), b"1234")
        with pytest.raises(InvalidRequest, match="layers"):
            engine.kv_write("a", KVSlice(0, 4, 0, 20), b"1234")
        with pytest.raises(InvalidRequest, match="tokens"):
            engine.kv_write("a", KVSlice(0, 3, 20, 20), b"1234")

    def test_kv_out_of_turn(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.add(request())
        for call in (
            lambda: engine.kv_write("a", KVSlice(0, 3, 0, 20), b""),
            lambda: engine.kv_read("a", KVSlice(0, 3, 0, 20)),
            lambda: engine.kv_read("nobody", KVSlice(0, 3, 0, 20)),
            lambda: engine.start("a", 5),
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

    @pytest.mark.parametrize(
        ("name", "value", "param"),
        [
            ("num_blocks", -1, "num_blocks"),
            ("num_blocks", 0, "num_blocks"),
            ("kv_memory_bytes", 0, "kv_memory"),
            ("paused_bytes", -1, "paused_memory"),
            ("host_workers", 0, "host_workers"),
            ("num_threads", -1, "num_threads"),
            ("num_threads", 1_000_000, "num_threads"),
            ("load_threads", 0, "load_threads"),
            ("max_context_tokens", -1, "max_context_tokens"),
            ("link_bytes_per_s", -1.0, "link_bytes_per_s"),
            ("link_bytes_per_s", math.nan, "link_bytes_per_s"),
        ],
    )
    def test_numbers_out_of_range_are_named(self, name: str, value: Any, param: str) -> None:
        with pytest.raises(Incompatible, match=f"engine: {name} must be") as refused:
            EngineConfig(**{name: value})
        assert refused.value.param == param

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


def test_blocks_of_a_failed_step_are_free_when_the_device_is_done(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched before the failure still writes to them, and KV for the next owner comes on another stream."""
    engine = make_engine()
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    free: list[int] = []
    device = SimpleNamespace(finish=lambda: free.append(engine.stats().num_free_blocks))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "_device_watch", device)
    monkeypatch.setattr(runner._model, "forward", broken)
    engine.add(request("a", 30))
    (output,) = engine.step().outputs
    assert output.finish_reason == "error"
    assert [engine.num_blocks - one for one in free] == [4]
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_a_token_that_cannot_be_drawn_ends_its_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = generate(make_engine(), request("good"))
    run = engine._runner.run

    def one_broken(scheduled: Any, *others: Any) -> list[SampledToken]:
        tokens = run(scheduled, *others)
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


def test_a_copy_under_way_ends_before_its_blocks_are_freed(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=6)
    engine.reserve(request("moving", 36))
    payload = bytes(36 * engine.layout.token_bytes)
    stopped: list[Exception] = []

    def write() -> None:
        try:
            while True:
                engine.kv_write("moving", KVSlice(0, 3, 0, 36), payload)
        except NotFound as error:
            stopped.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert engine.cancel("moving")
    alone = generate(make_engine(), request("next", 30))
    assert generate(engine, request("next", 30)) == alone
    writer.join()
    assert len(stopped) == 1
