"""Decode steps with weights on the host, over a slow link: all groups pass a layer while it is here (columns), or rows.

    python -m benchmarks.engine.offload_weights --links 100 200 400 --repeat 8

The model and sequences of `offload.py`. `in memory`: weights and KV on the device. `weights`: all layers'
weights on the host, KV on the device. `rows`, `columns`: KV on the host, too, by the schedules "latency" and
"throughput", with a staging buffer for one sequence. All take turns at each step; medians, ms. `loaded`: MB of weights
in a step by rows, and by columns. `waited`: share of the step by columns in which a layer waited for weights or KV.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine.offload import random_opt, started
from halfmoon.engine.config import OffloadConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_budget import device_weight_bytes
from halfmoon.sim.latency_sources.host_memory import HostMemory

_HOST_BYTES = 8 << 30


def modelled_s(engine: Engine, in_memory_s: float, num_tokens: int, weight_bytes: float, link: float) -> float:
    """The simulator's time of a step that computes for `in_memory_s` and loads weights and `num_tokens` over `link`."""
    layout = engine.layout
    token_s = layout.block_bytes / layout.block_tokens / (link * 1e6)
    host = HostMemory(0.0, token_s, layout.num_layers, weight_bytes / (link * 1e6))
    return host.step_s(in_memory_s, num_tokens)


def measured(engines: Sequence[Engine], settle: int, repeat: int, num_tokens: int, link: float) -> str:
    """One row of the table; the engines take turns. num_tokens: of KV."""
    rounds = [[engine.step() for engine in engines] for _ in range(settle + repeat)][settle:]
    times_s = [statistics.median(one.duration_s for one in steps) for steps in zip(*rounds, strict=True)]
    rows, columns = (statistics.median(one[number].staged.weight_bytes for one in rounds) for number in (2, 3))
    by_columns = [one[3] for one in rounds]
    waited = statistics.median((one.staged.weight_wait_s + one.staged.wait_s) / one.duration_s for one in by_columns)
    shown = "".join(f"{1e3 * one_s:11.1f}" for one_s in times_s)
    ratios = [
        modelled_s(engines[0], times_s[0], tokens, columns, link) / times_s[number]
        for number, tokens in ((1, 0), (3, num_tokens))
    ]
    model = "".join(f"{ratio:7.2f}x" for ratio in ratios)
    return f"{shown}{times_s[2] / times_s[3]:7.2f}x{rows / 1e6:9.1f}{columns / 1e6:9.1f}{waited:8.0%}{model}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--links", type=float, nargs="+", default=[100, 200, 400, 800], help="MB/s")
    parser.add_argument("--share", type=float, default=1.0, help="of the layers whose weights are on the host")
    parser.add_argument("--settle", type=int, default=4, help="steps before the counted ones")
    parser.add_argument("--repeat", type=int, default=8, help="counted steps")
    options = parser.parse_args(arguments)
    steps = options.settle + options.repeat + 4
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = random_opt(Path(directory), options.hidden, options.layers)
        here, away = (
            device_weight_bytes(checkpoint.model_config, torch.bfloat16, share) / 1e6 for share in (0.0, options.share)
        )
        print(f"weights on the device, buffers included: {away:.1f} MB of {here:.1f}", flush=True)
        names = ("in memory", "weights", "rows", "columns")
        print(
            f"{'MB/s':>6}{''.join(f'{name:>11}' for name in names)}{'gain':>8}{'loaded':>18}{'waited':>8}{'model':>16}",
            flush=True,
        )
        kinds: list[tuple[OffloadConfig | None, float]] = [(None, 0.0), (None, options.share)]
        kinds += [(OffloadConfig(_HOST_BYTES, way, "never"), options.share) for way in ("latency", "throughput")]
        num_tokens = options.batch * options.tokens
        for link in options.links:
            engines = [
                started(checkpoint, options.batch, options.tokens, steps, offload, False, link, share)
                for offload, share in kinds
            ]
            print(f"{link:6.0f}{measured(engines, options.settle, options.repeat, num_tokens, link)}", flush=True)
            for engine in engines:
                engine.close()


if __name__ == "__main__":
    main()
