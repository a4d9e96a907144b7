"""Times the Triton kernels at Llama-3.1-8B shapes on this host's GPU: `python -m benchmarks.engine.kernels [--json]`.

A kernel's bytes are what it must read and write once. Its share is its GB/s over those of a large device copy, measured
in the same run. Times are medians over CUDA-graph replays, timed by events, with the L2 cache replaced before each, so
that neither Python nor a warm cache affects them. Prefill is compared with torch's scaled_dot_product_attention,
mixed_attention with the two kernels that it unites, one after the other.
Without a GPU the program says so and exits with status 2. `--table` prints which of them attends, and needs none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.kernel_cases import Case, Shapes, cases
from halfmoon.engine.attention.attention_table import FUSED_FROM, TABLE

FLUSH_BYTES = 512 << 20  # several times any L2


COPY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Result:
    kernel: str
    shape: str
    moved_bytes: int
    time_us: float
    gb_per_s: float
    share_of_copy: float
    tflop_per_s: float | None = None
    peer: str | None = None
    peer_time_us: float | None = None
    speed_over_peer: float | None = None


def median_us(run: Callable[[], Any], repeats: int, flush: Tensor) -> float:
    """Median device time of one call, with the L2 cache replaced before each."""
    for _ in range(3):
        run()  # compiles, and lets torch choose its algorithms, outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    pairs: list[Any] = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    for start, end in pairs:
        flush.sum()  # reads: lines left dirty would be written back on the kernel's time
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times_us: list[float] = [1000.0 * start.elapsed_time(end) for start, end in pairs]
    return statistics.median(times_us)


def measure(case: Case, copy_gb_per_s: float, repeats: int, flush: Tensor) -> Result:
    time_us = median_us(case.run, repeats, flush)
    peer_us = median_us(case.peer, repeats, flush) if case.peer is not None else None
    gb_per_s = case.num_bytes / time_us / 1e3
    return Result(
        kernel=case.kernel,
        shape=case.shape,
        moved_bytes=case.num_bytes,
        time_us=time_us,
        gb_per_s=gb_per_s,
        share_of_copy=gb_per_s / copy_gb_per_s,
        tflop_per_s=case.flops / time_us / 1e6 if case.flops else None,
        peer=case.peer_name if case.peer is not None else None,
        peer_time_us=peer_us,
        speed_over_peer=peer_us / time_us if peer_us is not None else None,
    )


def measured_copy(repeats: int, flush: Tensor) -> float:
    """GB/s of a kernel that copies, counting bytes read and written.

    `copy_` would be a node of the graph that is not a kernel, and slower: 2,777 GB/s where this gives 4,263 (H200).
    """
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_us(lambda: torch.mul(source, 1.0, out=target), repeats, flush) / 1e3


def line(result: Result) -> str:
    text = (
        f"{result.kernel:18} {result.shape:46} {result.moved_bytes / 1e6:10.2f} MB {result.time_us:10.1f} us "
        f"{result.gb_per_s:8.0f} GB/s {100 * result.share_of_copy:5.0f} %"
    )
    if result.tflop_per_s is not None and result.speed_over_peer is not None:
        text += f"  {result.tflop_per_s:5.0f} TFLOP/s, {result.speed_over_peer:.2f}x {result.peer}"
    return text


def table() -> str:
    """Which code attends, in Markdown."""
    lines = ["| back end | attention | decodes | prompts | both |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join((*key, *row))} |" for key, row in TABLE.items()]
    fused = ["", "| compute capability | mixed_attention from so many tokens of decodes |", "|---|---|"]
    fused += [f"| {major}.{minor} | {tokens} |" for (major, minor), tokens in FUSED_FROM.items()]
    fused += [] if FUSED_FROM else ["| none | only with `--mixed-attention fused` |"]
    gathered = "Everything else is gathered: torch attends, to keys that it copies together."
    return "\n".join([*lines, "", gathered, *fused])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--table", action="store_true", help="print which kernel attends, and measure nothing")
    parser.add_argument("--only", default="", metavar="NAME", help="kernel files whose name contains NAME")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each kernel (default %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.table:
        print(table())
        return 0
    if not torch.cuda.is_available():
        print("kernels.py: no CUDA device: there is nothing to measure here", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    copy_gb_per_s = measured_copy(arguments.repeats, flush)
    if not arguments.json:
        print(f"{properties.name}: a device copy moves {copy_gb_per_s:.0f} GB/s; shares are of that")
    results, skipped = [], []
    for kernel, build in cases(Shapes(), properties.multi_processor_count):
        if arguments.only not in kernel:
            continue
        torch.cuda.empty_cache()
        try:
            built = build()
            for case in (built,) if isinstance(built, Case) else built:
                results.append(measure(case, copy_gb_per_s, arguments.repeats, flush))
                if not arguments.json:
                    print(line(results[-1]), flush=True)
        except torch.OutOfMemoryError as error:
            skipped.append(str(error).splitlines()[0])
            print(f"kernels.py: skipped, {skipped[-1]}", file=sys.stderr)
    if arguments.json:
        report = {
            "device": properties.name,
            "torch": torch.__version__,
            "copy_gb_per_s": copy_gb_per_s,
            "results": [asdict(result) for result in results],
            "skipped": skipped,
        }
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
