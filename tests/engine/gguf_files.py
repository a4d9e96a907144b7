"""Tiny models as GGUF files, some of their matrices in blocks of any bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from halfmoon.engine.models.blocks import BLOCK_SIZES, BlockFormat

_SCALES: Mapping[BlockFormat, float] = {
    "Q4_0": 0.03,
    "Q4_1": 0.03,
    "Q5_0": 0.015,
    "Q5_1": 0.015,
    "Q8_0": 0.002,
    "IQ4_NL": 0.003,
    "Q3_K": 1e-3,
    "Q4_K": 5e-4,
    "Q5_K": 2.5e-4,
    "Q6_K": 5e-5,
    "IQ4_XS": 1e-4,
}
_PLACES: Mapping[BlockFormat, tuple[int, ...]] = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q3_K": (108,),
    "Q6_K": (208,),
}  # of float16 in a block


def random_blocks(block_format: BlockFormat, num_columns: int, num_inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """[num_columns, bytes]: any bits, but for scales that are neither huge nor broken."""
    inputs, num_bytes = BLOCK_SIZES[block_format]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (num_columns, num_inputs // inputs, num_bytes), dtype=np.uint8)
    for place in _PLACES.get(block_format, (0,)):
        scales = (rng.uniform(-1, 1, data.shape[:2]) * _SCALES[block_format]).astype(np.float16)
        data[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return data.reshape(num_columns, -1)


def write_gguf(path: Path, hidden: int, formats: Mapping[str, BlockFormat], num_layers: int = 1) -> Path:
    """A Llama with a byte-level vocabulary; `formats` has those of matrices such as ffn_up that are in blocks.

    It has four query and two KV heads, and an inner size of twice `hidden`; "output" is a head of its own.
    """
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    words = [chr(ord("a") + i) for i in range(26)] + ["<s>", "</s>", "<unk>", "ab", "bc", "cd"]
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["a b", "b c", "c d"])
    writer.add_bos_token_id(26)
    writer.add_eos_token_id(27)
    writer.add_unk_token_id(28)

    def add(name: str, kind: str, rows: int, columns: int) -> None:
        if kind in formats:
            data = random_blocks(formats[kind], rows, columns, seed=len(name) + rows)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[formats[kind]])
        else:
            writer.add_tensor(name, rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.1))

    for layer in range(num_layers):
        for kind, rows in {
            "attn_q": hidden,
            "attn_k": hidden // 2,
            "attn_v": hidden // 2,
            "attn_output": hidden,
        }.items():
            add(f"blk.{layer}.{kind}.weight", kind, rows, hidden)
        for kind in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{kind}.weight", kind, 2 * hidden, hidden)
        add(f"blk.{layer}.ffn_down.weight", "ffn_down", hidden, 2 * hidden)
        for kind in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{kind}.weight", np.ones(hidden, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    add("token_embd.weight", "token_embd", len(words), hidden)
    if "output" in formats:
        add("output.weight", "output", len(words), hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
