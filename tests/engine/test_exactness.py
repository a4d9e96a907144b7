"""The same request gives the same bits on a CPU, whatever is computed beside it, in which pieces, and where."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput
from halfmoon.engine.step_result import StepResult
from halfmoon.kv.kv_layout import KVSlice
from tests.engine.engine_runs import prompt

NUM_SCHEDULES = 200
MOST_STEPS = 2000
HAPPENS = ("num_preempted", "num_right_drafts", "num_paused", "num_moved_out")


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


MODELS = ("llama", "qwen3", "opt", "qwen2-moe", "llama/int8", "qwen3/int4", "qwen3/int8 KV", "qwen3/fp8 KV")


@pytest.fixture(params=MODELS)
def engine_of(request: pytest.FixtureRequest, dtype: str, tiny_checkpoint: Callable[[str], Checkpoint]) -> Any:
    name, _, quantization = request.param.partition("/")
    kv_dtype, is_of_kv, _ = quantization.partition(" KV")
    checkpoint = prepare_checkpoint(
        str(tiny_checkpoint(name).path), quantization="auto" if is_of_kv else quantization or "auto"
    )
    of_kv = {"kv_dtype": kv_dtype} if is_of_kv else {}

    def make(**options: Any) -> Engine:
        return Engine(checkpoint, EngineConfig(**{"dtype": dtype, "num_blocks": 400, **of_kv, **options}))

    return make


def drawn_requests(rng: random.Random) -> list[EngineRequest]:
    """Long and short prompts, some with a common prefix, greedy and sampled."""
    common = prompt(rng.randrange(1000), rng.randrange(1, 120))
    requests = []
    for number in range(rng.randrange(2, 7)):
        own = prompt(rng.randrange(1000), rng.choice((1, 5, 20, 90, 280)))
        temperature = rng.choice((0.0, 1.0))
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 60),
            temperature=temperature,
            ignore_eos=True,
            seed=number,
            num_top_logprobs=5,
            allowed_token_ids=rng.choice(((), (7, 11))),  # of two tokens something repeats, and is guessed
        )
        tokens = common + own if rng.random() < 0.5 else own
        level, most_s = rng.randrange(3), rng.choice((0.0, 0.01, 1e9))
        requests.append(
            EngineRequest(f"r{number}", tokens, sampling, priority=level, class_priority=level, max_pause_s=most_s)
        )
    return requests


def results(outputs: list[TokenOutput], name: str) -> list[tuple[Any, ...]]:
    mine = (output for output in outputs if output.request_id == name)
    return [(output.token_id, output.logprobs, output.finish_reason) for output in mine]


def run(engine: Engine, waiting: list[EngineRequest], rng: random.Random) -> tuple[list[TokenOutput], Counter[str]]:
    """All outputs of requests that come at random moments, and how often what happened."""
    outputs: list[TokenOutput] = []
    counted: Counter[str] = Counter()
    for _ in range(MOST_STEPS):
        while waiting and (rng.random() < 0.3 or not engine.has_work()):
            engine.add(waiting.pop())
        if not engine.has_work():
            engine.check_integrity()
            return outputs, counted
        result = engine.step()
        outputs += result.outputs
        counts = [(output.num_drafts, output.num_right_drafts) for output in result.outputs]
        assert tuple(map(sum, zip(*counts, strict=True))) in ((result.num_drafts, result.num_right_drafts), ())
        for name in HAPPENS:
            counted[name] += getattr(result, name)
    raise AssertionError("the engine does not come to an end")


def test_a_request_has_the_same_bits_alone_and_in_any_schedule(engine_of: Callable[..., Engine]) -> None:
    alone = engine_of(prefix_cache=False)
    counted: Counter[str] = Counter()
    for number in range(NUM_SCHEDULES // 10):  # of a dozen models and types
        rng = random.Random(number)
        requests = drawn_requests(rng)
        expected = {one.request_id: results(run(alone, [one], rng)[0], one.request_id) for one in requests}
        block_tokens = rng.choice((8, 16, 64))
        engine = engine_of(
            block_tokens=block_tokens,
            num_blocks=rng.choice((480, 700, 4000)) // block_tokens,
            max_running=rng.choice((2, 4, 8)),
            max_batch_tokens=rng.choice((9, 33, 128, 512)),
            chunk_tokens=rng.choice((7, 64, 200)),
            num_threads=rng.choice((1, 2, 3)),
            speculation=rng.choice(("off", "ngram")),
            paused_bytes=rng.choice((None, None, 0, 40_000)),
        )
        outputs, found = run(engine, list(requests), rng)
        counted += found
        assert {one.request_id: results(outputs, one.request_id) for one in requests} == expected, number
        engine.close()
    assert set(counted) == set(HAPPENS)


def kv_of(engine: Engine, one: EngineRequest) -> bytes:
    return bytes(engine.kv_read(one.request_id, KVSlice(0, engine.layout.num_layers, 0, len(one.prompt_token_ids))))


class Interrupted:
    """An engine into whose steps requests come, where some run nested."""

    def __init__(self, engine: Engine, waiting: list[EngineRequest], rng: random.Random) -> None:
        self.outputs: list[TokenOutput] = []
        self.kv: dict[str, bytes] = {}  # of prompts that were handed over
        self.num_nested = 0
        self._engine = engine
        self._waiting = waiting
        self._rng = rng
        self._by_name = {one.request_id: one for one in waiting}
        self._held: list[EngineRequest] = []
        engine.call_between_layers(self._between_layers)
        engine.interrupt()

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            if not self._engine.has_work():
                if not self._waiting:
                    break
                self._engine.add(self._waiting.pop())
            self._heed(self._engine.step())
            self._hand_over(self._rng.randrange(4))
        self._hand_over(0)
        self._engine.check_integrity()

    def _between_layers(self) -> None:
        self._engine.interrupt()
        if self._waiting and self._rng.random() < 0.5:
            self._engine.add(self._waiting.pop())
        self._hand_over(self._rng.randrange(4))
        result = self._engine.nested_step()
        if result is not None:
            self.num_nested += len(result.num_computed_tokens)
            self._heed(result)

    def _heed(self, result: StepResult) -> None:
        self.outputs += result.outputs
        names = [output.request_id for output in result.outputs]
        self._held += [self._by_name[name] for name in names if self._by_name[name].prefill_only]

    def _hand_over(self, num_left: int) -> None:
        while len(self._held) > num_left:
            one = self._held.pop(0)
            self.kv[one.request_id] = kv_of(self._engine, one)
            assert self._engine.cancel(one.request_id)


def test_a_prompt_has_the_same_bits_in_the_middle_of_a_step_of_others(engine_of: Callable[..., Engine]) -> None:
    """So has the step around it: what it has computed so far stays as it is."""
    alone = engine_of(prefix_cache=False)
    num_nested = 0
    for number in range(10):
        rng = random.Random(number)
        requests = [
            replace(one, request_id=str(at), prefill_only=rng.random() < 0.8, priority=rng.randrange(2))
            for at, one in enumerate(one for _ in range(3) for one in drawn_requests(rng))
        ]
        expected: dict[str, list[tuple[Any, ...]]] = {}
        kv: dict[str, bytes] = {}
        for one in requests:
            expected[one.request_id] = results(run(alone, [one], rng)[0], one.request_id)
            if one.prefill_only:
                kv[one.request_id] = kv_of(alone, one)
                alone.cancel(one.request_id)
        engine = engine_of(
            block_tokens=rng.choice((8, 16)),
            max_running=rng.choice((4, 16)),
            max_batch_tokens=rng.choice((128, 512)),
            num_threads=rng.choice((1, 2, 3)),
        )
        interrupted = Interrupted(engine, list(requests), rng)
        interrupted.run()
        assert {one.request_id: results(interrupted.outputs, one.request_id) for one in requests} == expected, number
        assert interrupted.kv == kv, number
        num_nested += interrupted.num_nested
        engine.close()
    assert num_nested > 5
