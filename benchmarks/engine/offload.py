"""Decode steps with all KV on the host: loaded, or partly recomputed (KVPR), over the same slow link.

    python -m benchmarks.engine.offload --links 100 200 400 800 --repeat 12
    python -m benchmarks.engine.offload --links 50 100 --handed-over
    python -m benchmarks.engine.offload --ablation --links 100 400

An OPT of `--layers` layers and random weights decodes `--batch` sequences of `--tokens` tokens. They are prefilled here
or, with `--handed-over`, have KV from elsewhere, for which no layer's inputs are known. Three engines take turns at
each step: one with all KV in memory, one that loads it all, and one that chooses. The link is a copy in memory that
sleeps until the given rate (MB/s) allows it to be done.

`in memory`, `loaded`, `chosen`: medians of the last `--repeat` steps, ms. `gain`: loaded / chosen; with inputs, half
the size of K and V, it cannot exceed 2, with recomputed tokens it can. `all`: the same over all steps, including the
first `--settle` ones, in which rates are learned and inputs prepared. `hidden`: share of the link's busy time in which
the chosen engine also computed. `halves`: memory of its KV relative to that of K and V. `model`: the simulator's time
of a step that loads everything (`HostMemory`, from the time in memory, the bytes and the link) over `loaded`.

`--ablation`, as KVPR's: what a fetch runs beside (nothing; its own layer's computing, with one buffer; the layer
before, with two) and what is computed again (nothing, everything from inputs, what is chosen), all nine by turns.
Medians, ms, and the ratio of two buffers that load everything to each: what FlexGen does, and KVPR compares with.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import OPTConfig

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig, OffloadConfig, OffloadOverlap, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.sim.latency_sources.host_memory import HostMemory

SCHEDULES: tuple[OffloadSchedule, ...] = ("latency", "throughput")
RECOMPUTE: tuple[Literal["never", "always", "auto"], ...] = ("never", "always", "auto")
OVERLAPS: dict[OffloadOverlap, str] = {"none": "synchronous", "layer": "one buffer", "layers": "two buffers"}
_BLOCK_TOKENS = 64
_VOCABULARY = 1024


def random_opt(path: Path, hidden_size: int, num_layers: int) -> Checkpoint:
    """Creates a checkpoint that is only a configuration."""
    OPTConfig(
        vocab_size=_VOCABULARY, hidden_size=hidden_size, word_embed_proj_dim=hidden_size, ffn_dim=4 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // 64, max_position_embeddings=4096,
    ).save_pretrained(path)  # fmt: skip
    return prepare_checkpoint(str(path))


def started(
    checkpoint: Checkpoint,
    batch: int,
    tokens: int,
    steps: int,
    offload: OffloadConfig | None,
    handed_over: bool,
    link_mbps: float | None = None,
    host_weights: float = 0.0,
) -> Engine:
    """Creates an engine whose sequences have all been prefilled or handed over."""
    longest = tokens + steps
    blocks = -(-longest // _BLOCK_TOKENS)
    layers = checkpoint.model_config.num_layers
    few = 3 + 3 * blocks // layers  # two buffers for a layer of K, V and inputs of one sequence, plus a block or two
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
        host_weights=host_weights,
        link_bytes_per_s=None if link_mbps is None else link_mbps * 1e6,
        prefix_cache=False,
    )
    engine = Engine(checkpoint, config)
    sampling = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = torch.randint(3, _VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(number)).tolist()
        request = EngineRequest(str(number), tuple(prompt), sampling)
        if handed_over:
            engine.reserve(request)
            payload = bytes(tokens * layers * engine.layout.token_layer_bytes)
            engine.kv_write(request.request_id, KVSlice(0, layers, 0, tokens), payload)
            engine.start(request.request_id, 3)
        else:
            engine.add(request)
    while not handed_over and engine.step().num_prefill_tokens:
        continue
    return engine


class Columns(NamedTuple):
    """One row of the table, over engines that took the same steps in turns."""

    memory_s: float
    loaded_s: float
    chosen_s: float
    all_gain: float
    hidden_share: float
    halves_share: float
    kinds: str


def measured(engines: Sequence[Engine], settle: int, repeat: int) -> Columns:
    """Steps the engines in turns."""
    rounds = [[engine.step() for engine in engines] for _ in range(settle + repeat)]
    durations = list(zip(*([result.duration_s for result in results] for results in rounds), strict=True))
    medians = [statistics.median(times[settle:]) for times in durations]
    staged = [results[-1].staged for results in rounds[settle:]]
    link_s, wait_s = sum(work.link_s for work in staged), sum(work.wait_s for work in staged)
    used = [engine.num_blocks - engine.stats().num_free_blocks for engine in engines]
    kinds = Counter(kind for work in staged for kind in work.num_groups)
    return Columns(
        memory_s=medians[0],
        loaded_s=medians[1],
        chosen_s=medians[2],
        all_gain=sum(durations[1]) / sum(durations[2]),
        hidden_share=1 - wait_s / link_s,
        halves_share=used[2] / used[1],
        kinds=", ".join(f"{kind} {number / repeat:.0%}" for kind, number in kinds.most_common()),
    )


def ablation(
    make: Callable[[OffloadConfig, float], Engine], schedule: OffloadSchedule, link: float, rounds: range
) -> None:
    """Prints a row for each way to fetch, with a column for each share computed again."""
    ways = [(overlap, recompute) for overlap in OVERLAPS for recompute in RECOMPUTE]
    engines = [make(OffloadConfig(8 << 30, schedule, recompute, overlap), link) for overlap, recompute in ways]
    steps = [[engine.step().duration_s for engine in engines] for _ in range(rounds.stop)]
    medians = [statistics.median(times[rounds.start :]) for times in zip(*steps, strict=True)]
    took_s = dict(zip(ways, medians, strict=True))
    reference_s = took_s["layers", "never"]
    for overlap, name in OVERLAPS.items():
        cells = (f"{1e3 * took_s[overlap, way]:8.1f}{reference_s / took_s[overlap, way]:6.2f}x" for way in RECOMPUTE)
        print(f"{schedule:12}{link:6.0f}  {name:12}{''.join(cells)}", flush=True)
    for engine in engines:
        engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--links", type=float, nargs="+", default=[100, 200, 400, 800, 1600], help="MB/s")
    parser.add_argument("--schedules", choices=SCHEDULES, nargs="+", default=SCHEDULES)
    parser.add_argument("--settle", type=int, default=12, help="steps before the counted ones")
    parser.add_argument("--repeat", type=int, default=12, help="counted steps")
    parser.add_argument("--handed-over", action="store_true", help="decode KV received from elsewhere")
    parser.add_argument("--ablation", action="store_true", help="with less overlap, and without a choice, too")
    options = parser.parse_args(arguments)
    steps = options.settle + options.repeat + 4
    if options.ablation:
        print(f"{'schedule':12}{'MB/s':>6}  {'fetches':12}{''.join(f'{way:>15}' for way in RECOMPUTE)}", flush=True)
        _ablations(options, steps)
        return
    print(
        f"{'schedule':12}{'MB/s':>6}{'in memory':>11}{'loaded':>9}{'chosen':>9}{'gain':>8}{'all':>7}"
        f"{'hidden':>8}{'halves':>8}{'model':>8}  steps by kind",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = random_opt(Path(directory), options.hidden, options.layers)
        for schedule in options.schedules:
            for link in options.links:
                slowed = OffloadConfig(8 << 30, schedule)
                ways = [None, replace(slowed, recompute="never"), slowed]
                engines = [
                    started(checkpoint, options.batch, options.tokens, steps, way, options.handed_over, link)
                    for way in ways
                ]
                row = measured(engines, options.settle, options.repeat)
                layout = engines[0].layout
                token_s = layout.block_bytes / layout.block_tokens / (link * 1e6)
                modelled = HostMemory(0.0, token_s, layout.num_layers)
                model = modelled.step_s(row.memory_s, options.batch * options.tokens) / row.loaded_s
                shown = "".join(f"{1e3 * one_s:9.1f}" for one_s in (row.memory_s, row.loaded_s, row.chosen_s))
                print(
                    f"{schedule:12}{link:6.0f}  {shown}{row.loaded_s / row.chosen_s:7.2f}x{row.all_gain:6.2f}x"
                    f"{row.hidden_share:8.0%}{row.halves_share:8.0%}{model:7.2f}x  {row.kinds}",
                    flush=True,
                )
                for engine in engines:
                    engine.close()


def _ablations(options: argparse.Namespace, steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = random_opt(Path(directory), options.hidden, options.layers)

        def make(offload: OffloadConfig, link: float) -> Engine:
            return started(checkpoint, options.batch, options.tokens, steps, offload, options.handed_over, link)

        for schedule in options.schedules:
            for link in options.links:
                ablation(make, schedule, link, range(options.settle, options.settle + options.repeat))


if __name__ == "__main__":
    main()
