"""Each family's greedy text is transformers', in any batch, in chunks and after a preemption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.kv.kv_layout import KVSlice
from tests.engine.engine_runs import MakeEngine, finish, generate, in_any_steps, request, requests, tokens

FAMILIES = (
    "mistral-window",
    "phi3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "deepseek-v2",
    "deepseek-v3",
)


@pytest.fixture(scope="module")
def expected(
    tiny_checkpoint: Callable[[str], Checkpoint], reference: Callable[[Checkpoint], Any]
) -> Callable[[str], dict[str, list[int]]]:
    """`expected("gemma2")`: transformers' tokens by request, each computed without a cache, once."""
    found: dict[str, dict[str, list[int]]] = {}

    def of(family: str) -> dict[str, list[int]]:
        if family not in found:
            model, found[family] = reference(tiny_checkpoint(family)), {}
            for one in requests():
                ids = torch.tensor([one.prompt_token_ids])
                with torch.no_grad():
                    for _ in range(14):
                        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(dim=-1)), dim=1)
                found[family][one.request_id] = ids[0, len(one.prompt_token_ids) :].tolist()
        return found[family]

    return of


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"speculation": "ngram"}], ids=str)
@pytest.mark.parametrize(
    ("family", "is_freed"), [("mistral-window", True), ("gemma2", False), ("qwen2-windows", False)]
)
def test_blocks_behind_the_window_of_every_layer_are_freed(
    family: str, is_freed: bool, options: dict[str, Any], make_engine: MakeEngine
) -> None:
    engine = make_engine(family, num_blocks=40, **options)
    engine.add(request("a", 60, max_tokens=100))
    most_used, steps = 0, 0
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        steps += 1
        if steps > 1:
            most_used = max(most_used, engine.num_blocks - engine.stats().num_free_blocks)
    window_blocks = 21 // 8 + 2
    assert (most_used <= window_blocks) == is_freed
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_a_prompt_that_is_handed_over_keeps_its_blocks(make_engine: MakeEngine) -> None:
    expected = generate(make_engine("mistral-window"), request("a", 60))["a"]
    source, target = make_engine("mistral-window"), make_engine("mistral-window", prefix_cache=False)
    source.add(request("a", 60, prefill_only=True))
    (first,) = finish(source)
    target.reserve(request("a", 60))
    target.kv_write("a", KVSlice(0, 3, 0, 60), source.kv_read("a", KVSlice(0, 3, 0, 60)))
    target.start("a", first.token_id)
    assert [first.token_id, *tokens(finish(target))] == expected


@pytest.mark.parametrize("family", ["gemma2", "deepseek-v3"])
@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.1), ("fp8", 0.4)])
def test_quantised_kv_stays_close(family: str, kv_dtype: str, most: float, make_engine: MakeEngine) -> None:
    exact, rounded = (make_engine(family, kv_dtype=dtype) for dtype in ("auto", kv_dtype))
    assert rounded.layout.block_bytes < exact.layout.block_bytes / 2
    found = []
    for engine in (exact, rounded):
        engine.add(request("a", 40, max_tokens=1, num_top_logprobs=5))
        (output,) = finish(engine)
        assert output.logprobs is not None
        found.append(dict(output.logprobs.top))
    assert found[0].keys() & found[1].keys()
    errors = [abs(found[0][token] - found[1][token]) for token in found[0].keys() & found[1].keys()]
    assert max(errors) < most


@pytest.mark.parametrize("family", FAMILIES)
@in_any_steps
def test_tokens_are_those_of_transformers(
    family: str, options: dict[str, Any], make_engine: MakeEngine, expected: Callable[[str], dict[str, list[int]]]
) -> None:
    engine = make_engine(family, **options)
    assert generate(engine, *requests()) == expected(family)
    assert engine.stats().num_free_blocks == engine.num_blocks
