"""Long prompts over sequence ranks: `python -m benchmarks.engine.sequence_parallel [--ranks 2] [--tokens 2048,8192]`.

Measured: a tiny Llama with random weights, one thread a rank, against one rank of one thread in the same run; each
prompt once to warm up, then alternately. Predicted: a roofline's seconds of a prompt by the number of devices, and the
length from which sharing pays.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.sim.latency_sources.model_catalogue import model_shape
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.latency_sources.sequence_parallel import long_prompt_tokens, parallel_model

REPEATS = 3
PREDICTED = (2_000, 8_000, 32_000, 128_000)  # tokens
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65_536,
}


def checkpoint(path: Path) -> Checkpoint:
    """A random Llama with room for long prompts."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    return prepare_checkpoint(str(path))


def prefill_s(engine: Engine, num_tokens: int, name: str) -> float:
    """Seconds until the first token of a prompt that nothing else runs beside."""
    prompt = torch.randint(3, 500, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()
    started = time.perf_counter()
    engine.add(EngineRequest(name, tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def measured(num_ranks: int, lengths: list[int]) -> None:
    """Prints one row for each length."""
    print(f"| tokens | 1 rank (s) | {num_ranks} ranks (s) | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as path:
        tiny = checkpoint(Path(path))
        num_blocks = max(lengths) // 64 + num_ranks + 8
        engines = [
            Engine(
                tiny,
                EngineConfig(
                    dtype="float32",
                    num_blocks=num_blocks,
                    max_batch_tokens=2048,
                    prefix_cache=False,
                    num_threads=1,
                    attention="sdpa",  # as the ring attends
                    sequence_parallel=ranks,
                    long_prompt_tokens=512,
                ),
            )
            for ranks in (1, num_ranks)
        ]
        try:
            for length in lengths:
                times: list[list[float]] = [[], []]
                for number in range(REPEATS + 1):
                    for of, engine in zip(times, engines, strict=True):
                        of.append(prefill_s(engine, length, f"{length}-{number}"))
                one, many = (median(of[1:]) for of in times)
                print(f"| {length:,} | {one:.2f} | {many:.2f} | {one / many:.2f} |", flush=True)
        finally:
            for engine in engines:
                engine.close()


def predicted(model: str, gpu: str) -> None:
    """Prints one row for each number of devices."""
    print(f"| {model} on {gpu} |", " | ".join(f"{one:,} tokens (s)" for one in PREDICTED), "| pays from |")
    print("|---" * (len(PREDICTED) + 2) + "|")
    for tensor, sequence in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)):
        latency = parallel_model(Roofline(model_shape(model)), gpu, tensor, 1, sequence)
        most = long_prompt_tokens(latency)
        name = f"SP{sequence}" if sequence > 1 else f"TP{tensor}"
        cells = " | ".join(f"{latency.prefill_s(one):.3f}" for one in PREDICTED)
        print(f"| {name} | {cells} | {'–' if most is None else most + 1} |")


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="2048,8192,16384")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--gpus", default="h100,l40s")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for gpu in options.gpus.split(","):
        predicted(options.model, gpu)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}))
    measured(options.ranks, [int(one) for one in options.tokens.split(",")])


if __name__ == "__main__":
    main()
