"""An engine's promises: the same tokens alone, batched, cut, preempted and handed over."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.policy.models.chunk_length import ChunkRule
from halfmoon.policy.models.latency import PrefillModel, StepModel
from tests.engine.engine_runs import MakeEngine, finish, generate, prompt, request, requests, tokens


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
                part = KVSlice(layer, layer + 1, start, min(16, num_tokens - start))
                target.kv_write(one.request_id, part, source.kv_read(one.request_id, part))
        source.cancel(one.request_id)
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


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 9, "chunk_tokens": 3}, {"block_tokens": 3}])
def test_a_request_goes_on_within_a_block_that_was_computed_ahead(
    options: dict[str, Any], expected: dict[str, list[int]], make_engine: MakeEngine
) -> None:
    """As an answer that moves here: computed behind it twice, while others decode, and then taken over."""
    for one in requests():
        engine = make_engine(**options)
        answer = expected[one.request_id]
        engine.add(request("beside", 20, max_tokens=40))
        engine.step()
        for number in (3, 5):
            ahead = (*one.prompt_token_ids, *answer[:number])
            engine.add(
                replace(
                    one, request_id=f"ahead {number}", prompt_token_ids=ahead, prefill_only=True, keeps_partial=True
                )
            )
            while not any(output.request_id == f"ahead {number}" for output in engine.step().outputs):
                pass
        engine.add(replace(one, output_token_ids=tuple(answer[:7])))
        num_before = len(one.prompt_token_ids) + 5
        results = [engine.step()]
        assert results[0].num_cached_tokens == {one.request_id: num_before}
        while engine.has_work():
            results.append(engine.step())
        outputs = [output for result in results for output in result.outputs]
        assert tokens(outputs, one.request_id) == answer[7:]
        assert engine.stats().num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("is_held", [False, True])
def test_a_prompt_for_another_worker_is_not_computed_again(is_held: bool, make_engine: MakeEngine) -> None:
    """Its last, partial block is found, too: while it is handed over, and after a prefill worker cancelled it."""
    engine = make_engine()
    for name, num_known in (("a", 0), ("b", 29)):
        engine.add(request(name, 30, prefill_only=True))
        step = engine.step()
        assert step.num_cached_tokens == {name: num_known}
        if not is_held:
            engine.cancel(name)
        engine.check_integrity()
    engine.cancel_all()
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("max_tokens", [1, 12], ids=["their first token ends them", "they go on elsewhere"])
def test_many_prompts_for_another_worker_leave_no_block_in_use(max_tokens: int, make_engine: MakeEngine) -> None:
    """More partial blocks behind the same one than are compared, all in use at once."""
    engine = make_engine(max_running=20)
    front, sampling = prompt(1, 12), SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(20):
        engine.add(EngineRequest(f"{number}", (*front, 100 + number), sampling, prefill_only=True))
    finish(engine)
    assert engine.stats().num_held == 20
    engine.cancel_all()
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_the_front_of_a_known_block_is_not_computed_again(make_engine: MakeEngine) -> None:
    """The same prompt, its next turn, and another one with the same beginning; none changes what the others find."""
    engine = make_engine()
    first = request("a", 30)
    answer = generate(engine, first)["a"]
    turn = replace(first, request_id="turn", prompt_token_ids=(*first.prompt_token_ids, *answer, 5, 6, 7))
    other = replace(first, request_id="other", prompt_token_ids=(*first.prompt_token_ids[:13], 9, 9, 9))
    again = replace(first, request_id="again")
    for one, num_known in ((other, 13), (again, 29), (turn, 30 + 11), (other, 15), (again, 29)):
        engine.add(one)
        step = engine.step()
        engine.check_integrity()
        assert step.num_cached_tokens == {one.request_id: num_known}
        outputs = [*step.outputs, *finish(engine)]
        assert tokens(outputs, one.request_id) == generate(make_engine(prefix_cache=False), one)[one.request_id]
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_a_prompt_goes_without_the_front_of_a_block_that_its_own_blocks_displace(make_engine: MakeEngine) -> None:
    engine, first, other = make_engine(num_blocks=6), request("a", 30), request("b", 41, max_tokens=2)
    generate(engine, first)
    other = replace(other, prompt_token_ids=first.prompt_token_ids[:3] + other.prompt_token_ids[3:])
    engine.add(other)
    step = engine.step()
    assert step.num_cached_tokens == {"b": 0}
    outputs = [*step.outputs, *finish(engine)]
    assert tokens(outputs, "b") == generate(make_engine(prefix_cache=False), other)["b"]


def test_sampling_is_reproducible_whatever_the_batch(make_engine: MakeEngine) -> None:
    drawn = [request(f"s{seed}", 9 + seed, temperature=1.0, seed=seed, top_p=0.95) for seed in range(5)]
    alone: dict[str, list[int]] = {}
    for one in drawn:
        alone |= generate(make_engine(), one)
    assert generate(make_engine(max_batch_tokens=12, chunk_tokens=5), *drawn[::-1]) == alone
    other_seed = replace(drawn[0], sampling=replace(drawn[0].sampling, seed=99))
    assert generate(make_engine(), other_seed)["s0"] != alone["s0"]


def test_chunks_that_follow_targets_change_no_token(expected: dict[str, list[int]], make_engine: MakeEngine) -> None:
    lengths = set()
    for target_s in (None, 0.015, 0.03, math.inf):
        engine = make_engine(prefix_cache=False, max_batch_tokens=60, chunk_tokens=8)
        engine.follow_targets(ChunkRule(PrefillModel(0.0, 0.001, 1e-5), StepModel(0.001, 0.001, 0.0)))
        for one in requests():
            engine.add(replace(one, tbt_target_s=target_s))
        outputs: list[TokenOutput] = []
        chunks: list[int] = []
        while engine.has_work():
            result = engine.step()
            outputs += result.outputs
            chunks.append(result.num_prefill_tokens if result.num_decode_seqs else 0)
        assert {name: tokens(outputs, name) for name in expected} == expected
        lengths.add(max(chunks))
    assert len(lengths) == 4


def test_kv_goes_in_while_others_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    alone = generate(make_engine(), request("a", 20, max_tokens=40))
    engine.add(request("a", 20, max_tokens=40))
    engine.reserve(request("b", 30))
    payload = bytes(30 * engine.layout.token_bytes)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            engine.kv_write("b", KVSlice(0, 3, 0, 30), payload)

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
    assert (result.num_prefill_tokens, result.num_decode_seqs, result.num_prefill_pairs) == (20, 0, 200)
    engine.add(request("b", 8))
    result = engine.step()
    assert (result.num_prefill_tokens, result.num_decode_seqs, result.decode_context_tokens) == (8, 1, 21)
    assert result.duration_s > 0


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


@pytest.mark.parametrize("model", ["qwen3", "opt-norm-after", "mistral", "gemma3", "qwen2-moe", "deepseek-v3"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_every_dtype_runs(model: str, dtype: str, make_engine: MakeEngine) -> None:
    engine = make_engine(model, dtype=dtype, chunk_tokens=4)
    assert len(generate(engine, request("a", 30), request("b", 9))["a"]) == 12
    assert engine.layout.dtype in ("float32", "bfloat16") if dtype == "auto" else engine.layout.dtype == dtype
