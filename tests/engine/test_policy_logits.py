"""Under a KV policy the engine computes what a model with that mask computes, and keeps no more blocks than it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, TokenOutput
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_policy import KVPolicy, policy_salt
from tests.engine.engine_runs import finish, request

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BLOCK_TOKENS = 8
POLICY = KVPolicy(5, 12)  # one block, and two before a token's own

MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine_of(tiny_checkpoint: Callable[[str], Checkpoint]) -> Iterator[Callable[..., Engine]]:
    engines = []

    def make(name: str = "llama", **options: Any) -> Engine:
        config = {"dtype": "float32", "block_tokens": BLOCK_TOKENS, "num_blocks": 60, "num_threads": 1, **options}
        engines.append(Engine(tiny_checkpoint(name), EngineConfig(**config)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def under(policy: KVPolicy | None, one: EngineRequest) -> EngineRequest:
    return replace(one, tenant_salt=policy_salt(policy, one.tenant_salt))


def asked(name: str = "a", length: int = 61, max_tokens: int = 30, **options: Any) -> EngineRequest:
    return under(POLICY, request(name, length, max_tokens, num_top_logprobs=3, **options))


def seen(num_tokens: int, policy: KVPolicy) -> Tensor:
    """Which token sees which, [num_tokens, num_tokens], written down anew."""
    rows, keys = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    num_sinks, num_window = (-(-part // BLOCK_TOKENS) for part in policy)
    in_window = keys // BLOCK_TOKENS >= rows // BLOCK_TOKENS - num_window
    return (keys <= rows) & ((keys // BLOCK_TOKENS < num_sinks) | in_window)


def check(model: PreTrainedModel, one: EngineRequest, outputs: list[TokenOutput]) -> None:
    """Every token, and the log-probabilities of the likeliest, against the whole text computed with that mask."""
    outputs = [output for output in outputs if output.request_id == one.request_id]
    token_ids = [*one.prompt_token_ids, *(output.token_id for output in outputs)][:-1]
    mask = torch.zeros(1, 1, len(token_ids), len(token_ids))
    mask[0, 0].masked_fill_(~seen(len(token_ids), POLICY), float("-inf"))
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), attention_mask=mask).logits[0].float()
    expected = logits.log_softmax(-1)[len(one.prompt_token_ids) - 1 :]
    assert len(outputs) == one.sampling.max_tokens == len(expected)
    for output, row in zip(outputs, expected, strict=True):
        assert output.logprobs is not None
        for token_id, logprob in output.logprobs.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert float(row[output.token_id]) == pytest.approx(float(row.max()), abs=1e-4)


@pytest.mark.parametrize("attention", ["native", "sdpa", "flex"])
@pytest.mark.parametrize(
    "steps", [{}, {"max_batch_tokens": 9, "chunk_tokens": 3, "max_running": 4}], ids=["whole", "small"]
)
def test_logits_are_those_of_a_model_with_that_mask(
    attention: str,
    steps: dict[str, int],
    engine_of: Any,
    tiny_checkpoint: Any,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfmoon.engine.attention.flex_attention.can_compile", lambda device: False)
    one, other = asked(), replace(request("full", 33, 9), tenant_salt=b"")
    engine = engine_of(attention=attention, **steps)
    for each in (one, other):
        engine.add(each)
    check(reference(tiny_checkpoint("llama")), one, finish(engine))


@pytest.mark.parametrize("model", ["qwen3", "mixtral", "deepseek-v3"])
def test_other_models(model: str, engine_of: Any, tiny_checkpoint: Any, reference: Any) -> None:
    engine, one = engine_of(model), asked()
    engine.add(one)
    check(reference(tiny_checkpoint(model)), one, finish(engine))


def test_a_long_answer_needs_no_more_blocks(engine_of: Any) -> None:
    engine = engine_of(prefix_cache=False)
    engine.add(asked(length=61, max_tokens=60))
    used = []
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        used.append(engine.num_blocks - engine.stats().num_free_blocks)
    assert max(used[1:-1]) == 4  # sinks, two of the window, the token's own


def copied(source: Engine, target: Engine, one: EngineRequest, outputs: list[TokenOutput]) -> None:
    """Hands a request over from the one engine to the other."""
    num_tokens = len(one.prompt_token_ids)
    num_tokens -= len(POLICY.unseen(num_tokens, BLOCK_TOKENS)) * BLOCK_TOKENS
    assert target.reserve(one) == 0
    heard: list[Any] = []
    source.add(replace(one, prefill_only=True), heard.append)
    outputs += finish(source)
    assert heard[-1].num_tokens == num_tokens
    where = (0, source.layout.num_layers, 0, num_tokens)
    payload = source.kv_read(one.request_id, *where)
    assert payload.nbytes == num_tokens * source.layout.token_layer_bytes * source.layout.num_layers
    with pytest.raises(InvalidRequest):
        source.kv_read(one.request_id, 0, 1, 0, num_tokens + 1)
    target.kv_write(one.request_id, *where, payload)
    target.start(one.request_id, outputs[-1].token_id)
    source.release(one.request_id)


@pytest.mark.parametrize("length", [17, 33, 61, 64])
def test_a_hand_over_carries_only_what_is_kept(
    length: int, engine_of: Any, tiny_checkpoint: Any, reference: Any
) -> None:
    source, target = engine_of(chunk_tokens=7, max_batch_tokens=9, max_running=4), engine_of()
    outputs: list[TokenOutput] = []
    copied(source, target, asked(length=length), outputs)
    assert target.num_blocks - target.stats().num_free_blocks == min(length // BLOCK_TOKENS + 1, 4)
    outputs += finish(target)
    check(reference(tiny_checkpoint("llama")), asked(length=length), outputs)


def test_others_find_no_blocks_of_a_policy(engine_of: Any) -> None:
    engine = engine_of()
    engine.add(asked("first"))
    finish(engine)
    plain, same = (request(name, 61, 2) for name in ("plain", "same"))
    cached = {}
    for one in (plain, under(KVPolicy(5, 20), plain), under(POLICY, same)):
        engine.add(one)
        engine.step()
        cached[one.tenant_salt] = engine.find(one.request_id).num_cached
        finish(engine)
    assert list(cached.values()) == [0, 0, 56]


def test_a_pause_keeps_what_is_kept(engine_of: Any, tiny_checkpoint: Any, reference: Any) -> None:
    engine = engine_of(num_blocks=14, max_running=2)
    low = replace(asked("low", 50, 40), priority=2, class_priority=2, max_pause_s=1e9)
    engine.add(low)
    outputs = [output for _ in range(12) for output in engine.step().outputs]
    engine.add(replace(request("high", 90, 20), priority=0))
    moved = 0
    while engine.has_work():
        result = engine.step()
        moved += result.num_moved_out
        outputs += result.outputs
        engine.check_integrity()
    assert moved == 1
    check(reference(tiny_checkpoint("llama")), low, outputs)


def test_int8_kv_and_speculation_compose(engine_of: Any) -> None:
    greedy = under(POLICY, request("a", 61, 30, allowed_token_ids=(7, 11)))
    plain, guessing = engine_of(kv_dtype="int8"), engine_of(kv_dtype="int8", speculation="ngram")
    texts = []
    for engine in (plain, guessing):
        engine.add(greedy)
        texts.append([output.token_id for output in finish(engine)])
    assert texts[0] == texts[1]


def test_a_preempted_request_is_computed_again_under_its_policy(
    engine_of: Any, tiny_checkpoint: Any, reference: Any
) -> None:
    engine = engine_of(num_blocks=13)
    both = [asked(name, length, 40) for name, length in (("a", 30), ("b", 25))]
    for one in (request("full", 30, 40), *both):
        engine.add(one)
    outputs, num_preempted = [], 0
    while engine.has_work():
        result = engine.step()
        outputs += result.outputs
        num_preempted += result.num_preempted
        engine.check_integrity()
    assert num_preempted
    for one in both:
        check(reference(tiny_checkpoint("llama")), one, outputs)


def test_two_ranks(engine_of: Any, tiny_checkpoint: Any, reference: Any) -> None:
    engine, one = engine_of(tensor_parallel=2), asked()
    engine.add(one)
    check(reference(tiny_checkpoint("llama")), one, finish(engine))


def test_models_with_windows_refuse_it(engine_of: Any) -> None:
    with pytest.raises(InvalidRequest, match="windows of their own") as refusal:
        engine_of("mistral-window").add(asked())
    assert refusal.value.param == "kv_policy"
