"""Decode steps with all KV on the host: loaded, or computed again in part (KVPR), over the same slow link.

    python -m benchmarks.offload --links 100 200 400 800 --repeat 12

An OPT of `--layers` layers and random weights decodes `--batch` sequences of `--tokens` tokens. Three engines take
turns at each step: one with all KV in memory, one that loads it all, and one that chooses; medians of their steps. The
link is a copy in memory that sleeps until the given rate (MB/s) allows it to be done. `gain` is loaded / chosen; with
inputs, half of K and V, it cannot be larger than 2. The last column is the last new kind of choice and its promise.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import OPTConfig

from halfmoon.engine.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig, OffloadConfig, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams

SCHEDULES: tuple[OffloadSchedule, ...] = ("latency", "throughput")
_BLOCK_TOKENS = 64
_VOCABULARY = 1024


class Choices(logging.Handler):
    """Owns what engines said of their last choice."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the share of tokens that are computed again."""
        if record.getMessage() == "offload.chosen":
            fields = vars(record)
            if fields["num_tokens"]:
                share = fields["num_computed_again"] / fields["num_tokens"]
                self.last = f"{fields['kind']} {share:.0%}, a layer in {1e3 * fields['layer_s']:.1f} ms"


def random_opt(path: Path, hidden_size: int, num_layers: int) -> Checkpoint:
    """A configuration alone."""
    OPTConfig(
        vocab_size=_VOCABULARY, hidden_size=hidden_size, word_embed_proj_dim=hidden_size, ffn_dim=4 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // 64, max_position_embeddings=4096,
    ).save_pretrained(path)  # fmt: skip
    return prepare_checkpoint(str(path))


def started(checkpoint: Checkpoint, batch: int, tokens: int, steps: int, offload: OffloadConfig | None) -> Engine:
    """An engine whose sequences have all been prefilled."""
    longest = tokens + steps
    blocks = -(-longest // _BLOCK_TOKENS)
    layers = checkpoint.model_config.num_layers
    few = 3 + 3 * blocks // layers  # two buffers for a layer of K, V and inputs of one sequence, and a block or two
    config = EngineConfig(
        weights="dummy",
        block_tokens=_BLOCK_TOKENS,
        num_blocks=few if offload else batch * blocks,
        max_running=batch,
        max_batch_tokens=tokens + batch,
        chunk_tokens=tokens,
        num_threads=1,
        max_context_tokens=longest,
        offload=offload,
        prefix_cache=False,
    )
    engine = Engine(checkpoint, config)
    sampling = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = torch.randint(3, _VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(number)).tolist()
        engine.add(EngineRequest(str(number), tuple(prompt), sampling))
    while engine.step().num_prefill_tokens:
        continue
    return engine


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--links", type=float, nargs="+", default=[100, 200, 400, 800, 1600], help="MB/s")
    parser.add_argument("--repeat", type=int, default=12, help="steps")
    options = parser.parse_args(arguments)
    choices = Choices()
    logger = logging.getLogger("halfmoon.engine.offload")
    logger.addHandler(choices)
    logger.setLevel(logging.INFO)
    steps = options.repeat + 4
    print(
        f"{'schedule':12}{'MB/s':>6}{'in memory':>11}{'loaded':>9}{'chosen':>9}{'gain':>7}  ms a step; what was chosen"
    )
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = random_opt(Path(directory), options.hidden, options.layers)
        for schedule in SCHEDULES:
            for link in options.links:
                ways = [
                    None,
                    *(
                        OffloadConfig(8 << 30, schedule, recompute, link * 1e6)  # type: ignore[arg-type]
                        for recompute in ("never", "auto")
                    ),
                ]
                engines = [started(checkpoint, options.batch, options.tokens, steps, way) for way in ways]
                rounds = [[engine.step().duration_s for engine in engines] for _ in range(options.repeat)]
                memory_s, loaded_s, chosen_s = (statistics.median(times) for times in zip(*rounds, strict=True))
                shown = "".join(f"{1e3 * one_s:9.1f}" for one_s in (memory_s, loaded_s, chosen_s))
                print(f"{schedule:12}{link:6.0f}  {shown}{loaded_s / chosen_s:6.2f}x  {choices.last}")
                for engine in engines:
                    engine.close()


if __name__ == "__main__":
    main()
