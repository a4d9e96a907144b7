"""Size and speed of the store's entry codecs on real KV: whole blocks of the demo model, one thread.

    python -m benchmarks.kv.entries --tokens 1024 --repeat 3

KV is that of English prose (see benchmarks.kv.codecs) in bfloat16, cut into blocks of 64 and of 256 tokens with all
layers. Ratios count all bytes; speeds are in bytes of bfloat16 KV, medians of rounds in which the codecs take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.kv.codecs import Model, texts
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.kv.codec.lossless import Lossless, compress
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVLayout

NAMES = (
    "lz4",
    "zstd",
    "int8",
    "int8+lz4",
    "int8+zstd",
    "int4",
    "int4+lz4",
    "int4+zstd",
    "fp8",
    "fp8+zstd",
    "int2",
    "int2+zstd",
)


def measure(blocks: Sequence[bytes], layout: KVLayout, num_rounds: int) -> None:
    """Prints a line for each codec."""
    raw_bytes = len(blocks) * layout.block_bytes
    in_s: dict[str, list[float]] = {name: [] for name in NAMES}
    out_s: dict[str, list[float]] = {name: [] for name in NAMES}
    sizes: dict[str, int] = {}
    for _ in range(num_rounds):
        for name in NAMES:
            codec = EntryCodec.parse(name)
            started_s = time.perf_counter()
            payloads = [codec.encode(block, layout) for block in blocks]
            encoded_s = time.perf_counter()
            for payload in payloads:
                codec.decode(payload, layout)
            out_s[name].append(time.perf_counter() - encoded_s)
            in_s[name].append(encoded_s - started_s)
            sizes[name] = sum(memoryview(payload).nbytes for payload in payloads)
    print(f"{len(blocks)} blocks of {layout.block_tokens} tokens, {layout.block_bytes / 2**20:.2f} MiB")
    print(f"{'codec':12}{'ratio':>8}{'GB/s in':>10}{'GB/s out':>10}")
    for name in NAMES:
        speeds = [raw_bytes / statistics.median(times) / 1e9 for times in (in_s[name], out_s[name])]
        print(f"{name:12}{raw_bytes / sizes[name]:7.3f}x{speeds[0]:10.2f}{speeds[1]:10.2f}")
    unsplit = sum(len(compress(block, Lossless.LZ4)) for block in blocks)
    print(f"{'lz4, unsplit':12}{raw_bytes / unsplit:7.3f}x")


def cut(kv: NDArray[np.int16], block_tokens: int) -> list[bytes]:
    """Cuts KV into whole blocks in canonical order. kv: [layers, 2, heads, tokens, head_dim]"""
    starts = range(0, kv.shape[3] - block_tokens + 1, block_tokens)
    return [np.ascontiguousarray(kv[:, :, :, start : start + block_tokens]).tobytes() for start in starts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    checkpoint = prepare_checkpoint(options.model, as_numbers=True)
    [passage] = texts(Tokenizer(checkpoint), 1, options.tokens)
    kv = Model(checkpoint).kv(passage)
    layers, _, heads, _, head_dim = kv.shape
    for block_tokens in (64, 256):
        layout = KVLayout(layers, heads, head_dim, "bfloat16", block_tokens)
        measure(cut(kv, block_tokens), layout, options.repeat)


if __name__ == "__main__":
    main()
