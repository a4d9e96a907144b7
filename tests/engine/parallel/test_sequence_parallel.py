"""Ranks that share a prompt's tokens are one engine: the same logits, the same KV bytes, one life and one death."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig, OffloadConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput
from halfmoon.errors import Incompatible, InvalidRequest, ServiceFailed
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVSlice
from tests.engine.parallel.test_parallel_engine import finish, generate, hand_over, pid, request, requests

StartEngine = Callable[..., Engine]
FAMILIES = ("llama", "gemma2", "qwen2-moe", "deepseek-v3", "opt")  # windows and caps, experts, latents, no rotation


@pytest.fixture
def start_ring(start_engine: StartEngine) -> StartEngine:
    """`start_ring(3, "opt")`: that many ranks, of blocks of 8 tokens, which share prompts of more than 16."""

    def start(num_ranks: int, model: str = "llama", **options: Any) -> Engine:
        return start_engine(model=model, **{"sequence_parallel": num_ranks, "long_prompt_tokens": 16} | options)

    return start


def log_probabilities(engine: Engine, length: int) -> torch.Tensor:
    """Of every token of a prompt and of three behind it, given those before."""
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, num_top_logprobs=0, num_prompt_logprobs=0)
    engine.add(EngineRequest("scored", request("scored", length).prompt_token_ids, sampling))
    outputs: list[TokenOutput] = []
    while engine.has_work():
        outputs += engine.step().outputs
        engine.check_integrity()
    tokens = [*outputs[0].prompt_logprobs]
    tokens += [output.logprobs for output in outputs if output.logprobs is not None]
    return torch.tensor([one.logprob for one in tokens])


@pytest.mark.parametrize("model", FAMILIES)
def test_logits_are_those_of_one_rank(model: str, start_engine: StartEngine, start_ring: StartEngine) -> None:
    """In chunks that keys and that queries go round for, that begin and end within blocks, and in decodes."""
    expected = log_probabilities(start_engine(model=model), 150)
    assert len(expected) == 149 + 3
    for num_ranks, step_tokens in ((2, 512), (3, 70)) if model == "llama" else ((3, 70),):
        ring = start_ring(num_ranks, model, max_batch_tokens=step_tokens)
        torch.testing.assert_close(log_probabilities(ring, 150), expected, atol=1e-4, rtol=1e-4)
        assert ring.stats().num_free_blocks == ring.num_blocks


def test_logits_in_bfloat16_are_nearly_those_of_one_rank(start_engine: StartEngine, start_ring: StartEngine) -> None:
    engine, ring = start_engine(dtype="bfloat16"), start_ring(3, max_batch_tokens=70, dtype="bfloat16")
    expected, got = (log_probabilities(one, 150)[:149] for one in (engine, ring))  # of the prompt
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0.05)


def test_prompts_short_and_long_are_computed_beside_each_other(
    start_engine: StartEngine, start_ring: StartEngine
) -> None:
    expected = generate(start_engine(), *requests())
    engine = start_ring(4, max_batch_tokens=30, chunk_tokens=9)
    assert generate(engine, *requests()) == expected
    assert generate(engine, *requests()) == expected  # from the prefix cache
    assert generate(start_ring(2, num_blocks=24), *requests()) == expected  # with preemptions


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_kv_moves_to_and_from_a_worker_of_one_rank(
    num_ranks: int, start_engine: StartEngine, start_ring: StartEngine
) -> None:
    one, ring = start_engine(prefix_cache=False), start_ring(num_ranks, prefix_cache=False)
    for wanted in requests():
        expected = generate(one, wanted)[wanted.request_id]
        assert hand_over(ring, one, wanted, token_step=13) == expected
        assert hand_over(one, ring, wanted, token_step=13) == expected
    for engine in (one, ring):
        assert engine.stats().num_free_blocks == engine.num_blocks


def test_kv_is_read_while_later_layers_and_chunks_are_computed(
    start_engine: StartEngine, start_ring: StartEngine
) -> None:
    """What a listener hears of can be read at once, and is what one rank has."""
    one, ring = start_engine(prefix_cache=False), start_ring(3, prefix_cache=False, max_batch_tokens=40)
    wanted = request("read", 100, prefill_only=True)
    generate(one, wanted)
    news: list[Written] = []
    parts: list[tuple[KVSlice, bytes]] = []

    def on_kv(written: Written | None) -> None:
        assert written is not None
        news.append(written)
        if written.num_layers:
            start, layer = written.num_tokens, written.num_layers - 1
            part = KVSlice(layer, layer + 1, start, written.chunk_end - start)
            parts.append((part, bytes(ring.kv_read("read", part))))

    ring.add(wanted, on_kv)
    finish(ring)
    assert parts, "no layer was reported before its step ended"
    for part, got in parts:
        expected = torch.frombuffer(bytearray(one.kv_read("read", part)), dtype=torch.float32)
        torch.testing.assert_close(
            torch.frombuffer(bytearray(got), dtype=torch.float32), expected, atol=1e-4, rtol=1e-4
        )
    assert news[-1].num_tokens == 100
    with pytest.raises(InvalidRequest):
        ring.kv_read("read", KVSlice(0, 3, 90, 20))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_kv_goes_round(kv_dtype: str, start_engine: StartEngine, start_ring: StartEngine) -> None:
    one, ring = start_engine(kv_dtype=kv_dtype), start_ring(2, kv_dtype=kv_dtype)
    torch.testing.assert_close(log_probabilities(ring, 60), log_probabilities(one, 60), atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("own_processes")
def test_a_killed_rank_ends_all_with_the_reason(start_ring: StartEngine) -> None:
    engine = start_ring(3)
    engine.add(request("long", 100, max_tokens=20))
    engine.step()
    os.kill(pid(engine, 2), signal.SIGKILL)
    with pytest.raises(ServiceFailed, match="follower rank 2 was killed by signal 9"):
        finish(engine)
    engine.cancel_all()


def test_what_does_not_go_together_is_refused_by_name() -> None:
    with pytest.raises(Incompatible, match="leave out --sequence-parallel, or --tensor-parallel"):
        EngineConfig(sequence_parallel=2, tensor_parallel=2)
    with pytest.raises(Incompatible, match="leave out --offload-kv"):
        EngineConfig(sequence_parallel=2, offload=OffloadConfig(host_bytes=1 << 20))
    with pytest.raises(Incompatible, match="sequence_parallel must be at least 1"):
        EngineConfig(sequence_parallel=0)
    with pytest.raises(Incompatible, match="long_prompt_tokens must be at least 1"):
        EngineConfig(long_prompt_tokens=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_32k_tokens_over_four_ranks_give_the_logits_of_one(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """Of every token of the prompt, in steps of 2048."""
    path = tmp_path / "long"
    shutil.copytree(tiny_checkpoint("llama").path, path)
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint, found = prepare_checkpoint(str(path)), []
    for num_ranks in (1, 4):
        engine = Engine(
            checkpoint,
            EngineConfig(dtype="float32", num_blocks=544, max_batch_tokens=2048, sequence_parallel=num_ranks),
        )
        try:
            found.append(log_probabilities(engine, 32_000))
        finally:
            engine.close()
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)
