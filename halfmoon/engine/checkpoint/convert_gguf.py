"""`python -m halfmoon.engine.checkpoint.convert_gguf SRC DST [numbers]`: makes a Hugging Face directory of a GGUF file.

Weights in blocks that our own engine reads are kept as they are, the others become float32 safetensors; with `numbers`
all do, too, for those who read no blocks. Configuration and tokenizer come from transformers' reading of the file's
metadata. Supports Llama, Mistral, Qwen2 and Qwen3. Needs the memory of one file of safetensors, whatever the model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from halfmoon.engine.checkpoint.checkpoint import read_json
from halfmoon.engine.checkpoint.converted import ELSEWHERE
from halfmoon.engine.checkpoint.fingerprint import BLOCK_FILE, FINGERPRINT_FILE, SAMPLE_BYTES, Sample, fingerprint_of
from halfmoon.errors import Incompatible

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# As models/blocks.py, which has torch.
_BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
_COMPUTED = ("rope_freqs.weight",)
_SHARD_BYTES = 1 << 30


def convert_gguf(source: Path, target: Path, as_numbers: bool = False) -> None:
    """Writes `target`. Raises Incompatible for an unknown tensor or architecture."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    reader = GGUFReader(source)
    rotated_heads = _rotated_heads(reader, config)
    weights = [_Weight(tensor, rotated_heads) for tensor in reader.tensors if tensor.name not in _COMPUTED]
    blocks = [weight for weight in weights if weight.format in _BLOCK_FORMATS]
    numbers = [weight for weight in weights if as_numbers or weight.format not in _BLOCK_FORMATS]
    target.mkdir(parents=True)
    _check_room(target, sum(weight.block_bytes for weight in blocks) + sum(4 * prod(one.shape) for one in numbers))
    if blocks:
        formats = {weight.name: weight.format for weight in blocks}
        save_file({weight.name: weight.data() for weight in blocks}, target / BLOCK_FILE, metadata=formats)
    _save_numbers(numbers, target)
    config.tie_word_embeddings = "lm_head.weight" not in {weight.name for weight in weights}
    config.architectures = [_architecture(config.model_type)]
    config.dtype = "float32"
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    generation = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (target / "generation_config.json").write_text(json.dumps(generation))
    samples = (weight.sample() for weight in sorted(weights, key=lambda weight: weight.name))
    (target / FINGERPRINT_FILE).write_text(fingerprint_of(read_json(target / "config.json"), samples), encoding="ascii")


def _check_room(target: Path, num_bytes: int) -> None:
    """Raises Incompatible if the weights alone exceed what the file system has free."""
    free_bytes = shutil.disk_usage(target).free
    if num_bytes > free_bytes:
        raise Incompatible(
            f"its weights take {num_bytes >> 10:,} KiB in {target.parent}, which has {free_bytes >> 10:,} KiB free: "
            f"make room for {-(-(num_bytes - free_bytes) // 1024):,} KiB there, or {ELSEWHERE}"
        )


class _Weight:
    """A tensor of a file, under its transformers name and with its rows in our order."""

    def __init__(self, tensor: ReaderTensor, rotated_heads: dict[str, int]) -> None:
        self.name, self.format = transformers_name(tensor.name), tensor.tensor_type.name
        self.shape = [int(size) for size in reversed(tensor.shape)]
        self.block_bytes = int(tensor.n_bytes)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        self._tensor, self._num_heads = tensor, rotated_heads.get(kind)

    def data(self) -> NDArray[Any]:
        """As the file has it, row by row: [out_features, bytes] of blocks."""
        rows = self._tensor.data
        return np.ascontiguousarray(rows if self._num_heads is None else _halves_from_pairs(rows, self._num_heads))

    def numbers(self, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Some outputs of a matrix, or numbers of a vector."""
        values = dequantize(self.data()[rows], self._tensor.tensor_type)
        return np.ascontiguousarray(values.astype(np.float32, copy=False))

    def sample(self) -> Sample:
        """What its fingerprint is made of: that of its numbers, whatever they are kept as."""
        row_bytes = 4 * prod(self.shape[1:])
        content = self.numbers(slice(-(-SAMPLE_BYTES // row_bytes))).tobytes()
        return Sample(self.name, "F32", self.shape, content[:SAMPLE_BYTES])


def _save_numbers(weights: list[_Weight], target: Path) -> None:
    """Writes files of at most _SHARD_BYTES, or of one weight, and the index of several."""
    shards: list[list[_Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(4 * prod(one.shape) for one in (*shards[-1], weight)) > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(weight)
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({weight.name: weight.numbers() for weight in shard}, target / name, metadata={"format": "pt"})
        names |= {weight.name: name for weight in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(4 * prod(weight.shape) for weight in weights)}, "weight_map": names}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))


def transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises Incompatible for unknown names."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        raise Incompatible(f"GGUF tensor {name} is not known; supported: Llama, Mistral, Qwen2 and Qwen3 files")
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _rotated_heads(reader: GGUFReader, config: Any) -> dict[str, int]:
    """Number of heads by tensor kind, for files with interleaved rotary pairs: GGUF's `llama` architecture."""
    field = reader.get_field("general.architecture")
    if field is None or field.contents() != "llama":
        return {}
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def _halves_from_pairs(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorders the rows of each head from (0, h, 1, h+1, ...) to (0, 1, ..., h, h+1, ...), which rotates by halves."""
    rows, *rest = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _architecture(model_type: str) -> str:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if model_type not in names:
        raise Incompatible(f"GGUF files of type {model_type!r} are not supported; supported: {', '.join(names)}")
    return f"{names[model_type]}ForCausalLM"


def main(source: Path, target: Path, as_numbers: bool) -> None:
    """Makes `target` whole or not at all, also if who asked for it is gone, and another was quicker meanwhile."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        convert_gguf(source, partial, as_numbers)
        if not target.is_dir():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "numbers" in sys.argv[3:])
