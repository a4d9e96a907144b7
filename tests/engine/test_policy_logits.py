"""Under a KV policy the engine computes what a model with that mask computes, and keeps no more blocks than it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, TokenOutput
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.kv.kv_policy import H2O, SNAPKV, KVPolicy, kv_policy_of, policy_salt
from tests.engine.engine_runs import finish, request

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BLOCK_TOKENS = 8
POLICY = KVPolicy(5, 12)  # one block, and two before a token's own
CHOSEN = KVPolicy(12, 10, SNAPKV)  # two blocks, and two before a token's own
HEAVY = KVPolicy(12, 10, H2O)
CHOICES = {"snapkv": (32, 7), "h2o": (10**6, 1)}  # how many tokens choose, and over how many neighbours

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


def asked(name: str = "a", length: int = 61, max_tokens: int = 30, policy: KVPolicy = POLICY) -> EngineRequest:
    return under(policy, request(name, length, max_tokens, num_top_logprobs=3))


@pytest.fixture(params=[POLICY, CHOSEN, HEAVY], ids=str)
def policy(request: pytest.FixtureRequest) -> KVPolicy:
    found: KVPolicy = request.param
    return found


def seen(num_tokens: int, policy: KVPolicy) -> Tensor:
    """Which token sees which, [num_tokens, num_tokens], written down anew."""
    rows, keys = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    num_sinks, num_window = (-(-part // BLOCK_TOKENS) for part in policy[:2])
    in_window = keys // BLOCK_TOKENS >= rows // BLOCK_TOKENS - num_window
    return (keys <= rows) & ((keys // BLOCK_TOKENS < num_sinks) | in_window)


def chosen(attention: Tensor, num_prompt: int, policy: KVPolicy) -> Tensor:
    """Which token sees which, [heads, num_tokens, num_tokens], written down anew.

    attention: what tokens give to tokens with nothing hidden, [heads, num_tokens, num_tokens]; heads of one group.
    """
    num_chosen, num_window = (-(-part // BLOCK_TOKENS) for part in policy[:2])
    num_candidates = (num_prompt // BLOCK_TOKENS - num_window) * BLOCK_TOKENS
    sees = torch.ones(attention.shape[-2:], dtype=torch.bool).tril()
    if num_candidates <= num_chosen * BLOCK_TOKENS:
        early = torch.arange(num_chosen * BLOCK_TOKENS)
    else:
        observers, neighbours = CHOICES[str(policy).split(":")[0]]
        given = attention[:, max(num_prompt - observers, 0) : num_prompt, :num_candidates].sum((0, 1))
        padded = torch.nn.functional.pad(given, (neighbours // 2, neighbours // 2))
        early = padded.unfold(0, neighbours, 1).mean(1).topk(num_chosen * BLOCK_TOKENS).indices
    for row in range(num_prompt, len(sees)):
        first = max(row // BLOCK_TOKENS - num_window, 0) * BLOCK_TOKENS
        hidden = torch.arange(len(sees)) < first
        hidden[early] = False
        sees[row] &= ~hidden
    return sees


def attend_to_chosen(num_prompt: int, policy: KVPolicy) -> Callable[..., tuple[Tensor, None]]:
    """Attention of transformers' models over what each KV head chooses."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **rest: Any) -> Any:
        num_heads = q.shape[1]
        keys, values = (part[0].repeat_interleave(num_heads // part.shape[1], 0) for part in (k, v))
        scores = q[0] @ keys.transpose(1, 2) * scaling
        attention = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf")).softmax(
            -1
        )
        num_cached = 1 if hasattr(module.config, "kv_lora_rank") else k.shape[1]  # of latents there is one head
        groups = attention.view(num_cached, -1, *attention.shape[1:])
        sees = torch.stack([chosen(group, num_prompt, policy) for group in groups])
        sees = sees.repeat_interleave(num_heads // num_cached, 0)
        return (scores.masked_fill(~sees, float("-inf")).softmax(-1) @ values).transpose(0, 1)[None], None

    return attend


def logits_under(policy: KVPolicy, model: PreTrainedModel, token_ids: list[int], num_prompt: int) -> Tensor:
    """Of the whole text [num_tokens, vocab_size], by transformers."""
    if policy.chooses:
        AttentionInterface.register("chosen", attend_to_chosen(num_prompt, policy))
        model.set_attn_implementation("chosen")
        mask = None
    else:
        mask = torch.zeros(1, 1, len(token_ids), len(token_ids))
        mask[0, 0].masked_fill_(~seen(len(token_ids), policy), float("-inf"))
    try:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([token_ids]), attention_mask=mask).logits[0].float()
    finally:
        model.set_attn_implementation("eager")  # other tests ask the same model
    return logits


def check(model: PreTrainedModel, one: EngineRequest, outputs: list[TokenOutput]) -> None:
    """Every token, and the log-probabilities of the likeliest, against the whole text computed with that mask."""
    outputs = [output for output in outputs if output.request_id == one.request_id]
    token_ids = [*one.prompt_token_ids, *(output.token_id for output in outputs)][:-1]
    num_prompt, policy = len(one.prompt_token_ids), kv_policy_of(one.tenant_salt)
    assert policy is not None
    expected = logits_under(policy, model, token_ids, num_prompt).log_softmax(-1)[num_prompt - 1 :]
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
    policy: KVPolicy,
    engine_of: Any,
    tiny_checkpoint: Any,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfmoon.engine.attention.flex_attention.can_compile", lambda device, block_tokens: False)
    one, other = asked(policy=policy), replace(request("full", 33, 9), tenant_salt=b"")
    engine = engine_of(attention=attention, **steps)
    for each in (one, other):
        engine.add(each)
    check(reference(tiny_checkpoint("llama")), one, finish(engine))


@pytest.mark.parametrize("model", ["qwen3", "mixtral", "deepseek-v3"])
def test_other_models(model: str, policy: KVPolicy, engine_of: Any, tiny_checkpoint: Any, reference: Any) -> None:
    engine, one = engine_of(model), asked(policy=policy)
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
    policy = kv_policy_of(one.tenant_salt)
    assert policy is not None
    num_tokens -= len(policy.unseen(num_tokens, BLOCK_TOKENS)) * BLOCK_TOKENS
    assert target.reserve(one) == 0
    heard: list[Any] = []
    source.add(replace(one, prefill_only=True), heard.append)
    outputs += finish(source)
    assert heard[-1].num_tokens == num_tokens
    where = KVSlice(0, source.layout.num_layers, 0, num_tokens)
    payload = source.kv_read(one.request_id, where)
    assert payload.nbytes == num_tokens * source.layout.token_layer_bytes * source.layout.num_layers
    with pytest.raises(InvalidRequest):
        source.kv_read(one.request_id, KVSlice(0, 1, 0, num_tokens + 1))
    target.kv_write(one.request_id, where, payload)
    target.start(one.request_id, outputs[-1].token_id)
    source.cancel(one.request_id)


@pytest.mark.parametrize("length", [17, 33, 61, 64])
def test_a_hand_over_carries_only_what_is_kept(
    length: int, policy: KVPolicy, engine_of: Any, tiny_checkpoint: Any, reference: Any
) -> None:
    source, target = engine_of(chunk_tokens=7, max_batch_tokens=9, max_running=4), engine_of()
    outputs: list[TokenOutput] = []
    one = asked(length=length, policy=policy)
    copied(source, target, one, outputs)
    num_kept = -(-policy.num_early // BLOCK_TOKENS) + 3  # and two of the window, the token's own
    assert target.num_blocks - target.stats().num_free_blocks == min(length // BLOCK_TOKENS + 1, num_kept)
    outputs += finish(target)
    check(reference(tiny_checkpoint("llama")), one, outputs)


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


def test_a_pause_keeps_what_is_kept(policy: KVPolicy, engine_of: Any, tiny_checkpoint: Any, reference: Any) -> None:
    engine = engine_of(num_blocks=14, max_running=2)
    low = replace(asked("low", 50, 40, policy), priority=2, class_priority=2, max_pause_s=1e9)
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


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_kv_and_speculation_compose(policy: KVPolicy, engine_of: Any, kv_dtype: str) -> None:
    greedy = under(policy, request("a", 61, 30, allowed_token_ids=(7, 11)))
    plain, guessing = engine_of(kv_dtype=kv_dtype), engine_of(kv_dtype=kv_dtype, speculation="ngram")
    texts = []
    for engine in (plain, guessing):
        engine.add(greedy)
        texts.append([output.token_id for output in finish(engine)])
    assert texts[0] == texts[1]


def test_a_preempted_request_is_computed_again_under_its_policy(
    policy: KVPolicy, engine_of: Any, tiny_checkpoint: Any, reference: Any
) -> None:
    engine = engine_of(num_blocks=13)
    both = [asked(name, length, 40, policy) for name, length in (("a", 30), ("b", 25))]
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


@pytest.mark.parametrize(("policy", "num_cached"), [(CHOSEN, 24), (HEAVY, 0)], ids=str)  # blocks of 61 - 32 tokens
def test_what_is_chosen_does_not_depend_on_what_was_cached(
    policy: KVPolicy, num_cached: int, engine_of: Any, tiny_checkpoint: Any, reference: Any
) -> None:
    engine = engine_of()
    for name in ("first", "second"):
        one = asked(name, policy=policy)
        engine.add(one)
        outputs = list(engine.step().outputs)
        assert engine.find(name).num_cached == (num_cached if name == "second" else 0)
        check(reference(tiny_checkpoint("llama")), one, outputs + finish(engine))


def test_two_ranks(policy: KVPolicy, engine_of: Any, tiny_checkpoint: Any, reference: Any) -> None:
    engine, one = engine_of(tensor_parallel=2), asked(policy=policy)
    engine.add(one)
    check(reference(tiny_checkpoint("llama")), one, finish(engine))


def test_models_with_windows_refuse_it(engine_of: Any) -> None:
    with pytest.raises(InvalidRequest, match="windows of their own") as refusal:
        engine_of("mistral-window").add(asked())
    assert refusal.value.param == "kv_policy"
