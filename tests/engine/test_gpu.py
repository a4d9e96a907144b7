"""The engine on a GPU: Llama-3.1-8B's configuration with dummy weights, in bfloat16."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput
from halfmoon.kv.kv_layout import KVSlice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 44 << 30,
        reason="needs a CUDA device with 44 GiB",
    ),
]
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
CONFIG = EngineConfig(device="cuda", weights="dummy", num_blocks=256, max_running=8, max_context_tokens=8192)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("llama-3.1-8b")
    (path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    return prepare_checkpoint(str(path))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[Engine]:
    yield Engine(checkpoint, CONFIG)
    gc.collect()
    torch.cuda.empty_cache()


def request(name: str, length: int) -> EngineRequest:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(1000, 128000, (length,), generator=generator).tolist()
    return EngineRequest(name, tuple(prompt), GREEDY)


def run(engine: Engine, *requests: EngineRequest) -> list[TokenOutput]:
    for one in requests:
        engine.add(one)
    outputs: list[TokenOutput] = []
    while engine.has_work():
        outputs += engine.step().outputs
    engine.check_integrity()
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[tuple[str, int, int]]:
    return sorted((output.request_id, output.position, output.token_id) for output in outputs)


def test_graphs_give_the_tokens_of_eager_steps(engine: Engine, checkpoint: Checkpoint) -> None:
    """Batches whose size is a graph's run the very same kernels: the tokens are equal, not close."""
    batches = [[request(f"{size}-{row}", 100 + 97 * row) for row in range(size)] for size in (1, 4, 8)]
    recorded = [tokens(run(engine, *batch)) for batch in batches]
    eager = Engine(checkpoint, replace(CONFIG, cuda_graphs=False, num_blocks=128))
    assert [tokens(run(eager, *batch)) for batch in batches] == recorded
    assert len({token for batch in recorded for _, _, token in batch}) > 10  # not one token over and over


def test_prefill_and_decode_are_sane(engine: Engine) -> None:
    """Long prompts in chunks beside running decodes; log-probabilities are numbers, and outputs complete."""
    asked = [
        replace(request(f"r{length}", length), sampling=replace(GREEDY, num_top_logprobs=2))
        for length in (3, 64, 700, 2100, 5000)
    ]
    outputs = run(engine, *asked)
    assert len(outputs) == 5 * 24
    assert all(0 <= output.token_id < 128256 for output in outputs)
    for output in outputs:
        assert output.logprobs is not None
        assert math.isfinite(output.logprobs.logprob)
        assert output.logprobs.logprob <= 0


def test_a_prompt_again_finds_its_prefix(engine: Engine) -> None:
    """Fewer rows in the products round otherwise, in bfloat16: near at the first token, equal between two hits."""
    with_logprobs = replace(GREEDY, num_top_logprobs=1)
    one = replace(request("prefix", 1000), sampling=with_logprobs)
    cold = run(engine, one)
    engine.add(one)
    first = engine.step()
    assert first.num_cached_tokens == {"prefix": 999}
    warm = [*first.outputs, *run(engine)]
    assert tokens(run(engine, one)) == tokens(warm)
    assert cold[0].logprobs is not None
    assert warm[0].logprobs is not None
    assert abs(cold[0].logprobs.top[0][1] - warm[0].logprobs.top[0][1]) < 0.05


def test_kv_out_and_in_again_continues_the_request(engine: Engine) -> None:
    """Through pinned memory and the side streams, into other blocks: all of it, and what a cached prefix leaves."""
    whole = request("whole", 777)
    run(engine, whole)
    expected = [token for _, _, token in tokens(run(engine, whole))]
    engine.add(replace(whole, request_id="source", prefill_only=True))
    (first,) = run(engine)
    num_here = engine.reserve(replace(whole, request_id="target"))  # whole blocks: those are shared
    assert num_here == 768
    for layer in range(0, 32, 8):
        part = KVSlice(layer, layer + 8, num_here, 777 - num_here)
        engine.kv_write("target", part, engine.kv_read("source", part))
    engine.cancel("source")
    engine.start("target", first.token_id)
    assert [first.token_id, *(token for _, _, token in tokens(run(engine)))] == expected
