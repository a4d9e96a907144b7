"""The whole engine on the triton kernels gives the tokens of the sdpa back end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from halfmoon.engine import device_path
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import choose_path, compile_ahead
from halfmoon.engine.engine import Engine
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.step_result import StepResult
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.kv.kv_policy import SNAPKV, KVPolicy, policy_salt

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from tests.engine.kernels.conftest import HAS_GPU  # isort: skip  (chooses the interpreter where there is no GPU)
from halfmoon.engine.attention.triton_attention import TritonBackend  # isort: skip
from halfmoon.engine.kernels import block_copy, prefill_attention  # isort: skip
from halfmoon.engine.kernels.prefill_attention import prefill_tile_sizes  # isort: skip
from tests.engine.test_models import BLOCK_TOKENS as PAGED_BLOCK_TOKENS, load, paged_logits  # isort: skip

MakeEngine = Callable[..., Engine]
DEVICE = "cuda" if HAS_GPU else "cpu"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def request(name: str, length: int, max_tokens: int = 4) -> EngineRequest:
    generator = torch.Generator().manual_seed(length)
    prompt = tuple(torch.randint(3, 199, (length,), generator=generator).tolist())
    return EngineRequest(name, prompt, replace(GREEDY, max_tokens=max_tokens))


def generate(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    for one in requests:
        engine.add(one)
    outputs = [output for result in run(engine) for output in result.outputs]
    return {one.request_id: [out.token_id for out in outputs if out.request_id == one.request_id] for one in requests}


def run(engine: Engine) -> list[StepResult]:
    """Every step until no work is left."""
    results = []
    while engine.has_work():
        results.append(engine.step())
        engine.check_integrity()
    return results


def finish(engine: Engine) -> list[int]:
    """What the only request still gets."""
    return [output.token_id for result in run(engine) for output in result.outputs]


@pytest.fixture
def make_triton(make_engine: MakeEngine) -> MakeEngine:
    def make(model: str, **options: Any) -> Engine:
        return make_engine(model, attention="triton", device=DEVICE, **options)

    return make


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3", {"max_batch_tokens": 16, "chunk_tokens": 5}),
        ("opt", {"block_tokens": 3, "num_blocks": 40}),
    ],
    ids=["qwen3 in chunks", "opt, odd blocks"],
)
def test_the_tokens_are_those_of_sdpa(
    model: str, options: dict[str, Any], make_engine: MakeEngine, make_triton: MakeEngine
) -> None:
    requests = [request("a", 19, 3), request("b", 1, 6), request("c", 15)]
    assert generate(make_triton(model, **options), *requests) == generate(make_engine(model), *requests)


@pytest.mark.skipif(HAS_GPU, reason="computes on a CPU, in the interpreter")
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_latent_models_have_the_logits_of_torch(name: str, tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    checkpoint = tiny_checkpoint(name)
    token_ids = torch.randint(3, 199, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    choices: tuple[Literal["sdpa", "triton"], ...] = ("sdpa", "triton")
    for attention in choices:
        config = EngineConfig(attention=attention, block_tokens=PAGED_BLOCK_TOKENS, device="cpu")
        path = choose_path(config, checkpoint.model_config, torch.float32, 64)
        assert isinstance(path.attention, TritonBackend) == (attention == "triton")
        model = load(checkpoint, path=path)
        logits.append(paged_logits(model, checkpoint, token_ids, (9, 10, 11, 23, 24), path.attention))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_with_quantised_kv_the_tokens_are_those_of_native(
    kv_dtype: str, make_engine: MakeEngine, make_triton: MakeEngine
) -> None:
    requests = [request("a", 19, 3), request("b", 1, 6), request("c", 15)]
    make = {"kv_dtype": kv_dtype, "max_batch_tokens": 16, "chunk_tokens": 5}
    assert generate(make_triton("qwen3", **make), *requests) == generate(make_engine("qwen3", **make), *requests)


@pytest.mark.parametrize("policy", [KVPolicy(3, 9), KVPolicy(12, 5, SNAPKV)], ids=str)
def test_under_a_kv_policy_the_tokens_are_those_of_native(
    make_engine: MakeEngine, make_triton: MakeEngine, policy: KVPolicy
) -> None:
    one = replace(request("a", 45, 8), tenant_salt=policy_salt(policy, b""))
    assert generate(make_triton("llama"), one, request("b", 9)) == generate(make_engine("llama"), one, request("b", 9))


def test_a_preempted_request_goes_on(make_engine: MakeEngine, make_triton: MakeEngine) -> None:
    requests = [request("a", 15, 3), request("b", 14, 4)]
    engine = make_triton("llama", num_blocks=4)
    for one in requests:
        engine.add(one)
    results = run(engine)
    assert sum(result.num_preempted for result in results) == 1
    tokens = sorted((out.request_id, out.position, out.token_id) for result in results for out in result.outputs)
    alone = generate(make_engine("llama"), *requests)
    assert tokens == [(name, at, token) for name, ids in sorted(alone.items()) for at, token in enumerate(ids)]


def test_a_cached_prefix_is_attended_to(make_engine: MakeEngine, make_triton: MakeEngine) -> None:
    engine = make_triton("qwen3")
    first = generate(engine, request("first", 20))["first"]
    engine.add(request("again", 20))
    result = engine.step()
    assert (result.num_cached_tokens, result.num_prefill_tokens) == ({"again": 19}, 1)
    assert [result.outputs[0].token_id, *finish(engine)] == first
    assert first == generate(make_engine("qwen3"), request("first", 20))["first"]


def test_a_request_moves_between_the_back_ends(make_engine: MakeEngine, make_triton: MakeEngine) -> None:
    whole = request("a", 21)
    expected = generate(make_engine("llama"), whole)["a"]
    for source, target in ((make_triton("llama"), make_engine("llama")), (make_engine("llama"), make_triton("llama"))):
        source.add(replace(whole, prefill_only=True))
        (first,) = source.step().outputs
        target.reserve(whole)
        for layer in range(3):
            part = KVSlice(layer, layer + 1, 0, 21)
            target.kv_write("a", part, source.kv_read("a", part))
        target.start("a", first.token_id)
        assert [first.token_id, *finish(target)] == expected


def test_what_prompts_need_is_compiled_ahead(make_triton: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of another length, and KV that is copied, are launched as something was before."""
    compiled: set[tuple[object, ...]] = set()

    def sizes(q: Tensor, num_rows: int, most_rows: int) -> tuple[int, int, int]:
        found = prefill_tile_sizes(q, num_rows, most_rows)
        compiled.add(found)
        return found

    def launch(*args: Any) -> None:
        compiled.add((args[-1],))
        block_copy_launch(*args)

    engine = make_triton("qwen3", num_blocks=17)
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    block_copy_launch = block_copy._launch
    monkeypatch.setattr(prefill_attention, "prefill_tile_sizes", sizes)
    monkeypatch.setattr(block_copy, "_launch", launch)
    monkeypatch.setattr(device_path, "_TILED_TOKENS", 32)  # of float32 the largest tile has no more rows
    compile_ahead(runner, runner._arena, engine.layout, engine.context_tokens)
    ahead = set(compiled)
    assert {("gather",), ("scatter",)} < ahead
    assert generate(engine, *(request(str(length), length, 1) for length in (2, 5, 40)))
    engine.add(replace(request("copied", 9), prefill_only=True))
    run(engine)
    engine.kv_read("copied", KVSlice(0, 3, 0, 9))
    assert compiled == ahead


def test_auto_is_triton_on_cuda_alone() -> None:
    assert EngineConfig(device="cpu").attention_backend == "native"
    assert EngineConfig(device="cuda").attention_backend == "triton"
    assert EngineConfig(device="cuda:1", attention="sdpa").attention_backend == "sdpa"
    assert EngineConfig(device="cpu", attention="triton").attention_backend == "triton"
