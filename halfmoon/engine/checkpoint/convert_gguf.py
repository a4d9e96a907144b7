"""`python -m halfmoon.engine.checkpoint.convert_gguf SRC DST`: makes a Hugging Face directory of a GGUF file.

Weights are dequantised to float32 safetensors; those in blocks that our own engine multiplies with are also kept as
they are. Configuration and tokenizer come from transformers' reading of the
file's metadata. Supports Llama, Mistral, Qwen2 and Qwen3.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from halfmoon.engine.checkpoint.checkpoint import BLOCK_FILE
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
_BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
_COMPUTED = ("rope_freqs.weight",)


def convert_gguf(source: Path, target: Path) -> None:
    """Writes `target`. Raises Incompatible for an unknown tensor or architecture."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    reader = GGUFReader(source)
    tensors = convert_tensors(reader.tensors, _rotated_heads(reader, config))
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    blocks, formats = convert_blocks(reader.tensors, _rotated_heads(reader, config))
    if blocks:
        save_file(blocks, target / BLOCK_FILE, metadata=formats)
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    config.architectures = [_architecture(config.model_type)]
    config.dtype = "float32"
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    generation = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (target / "generation_config.json").write_text(json.dumps(generation))


def convert_tensors(tensors: list[ReaderTensor], rotated_heads: dict[str, int]) -> dict[str, NDArray[np.float32]]:
    """Dequantised tensors under their transformers names; `rotated_heads` comes from `_rotated_heads`."""
    converted = {}
    for tensor in tensors:
        if tensor.name in _COMPUTED:
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        converted[transformers_name(tensor.name)] = np.ascontiguousarray(_in_our_order(tensor, values, rotated_heads))
    return converted


def convert_blocks(
    tensors: list[ReaderTensor], rotated_heads: dict[str, int]
) -> tuple[dict[str, NDArray[np.uint8]], dict[str, str]]:
    """The weights in blocks, [out_features, bytes], and their formats, under their transformers names."""
    blocks, formats = {}, {}
    for tensor in tensors:
        if tensor.name in _COMPUTED or tensor.tensor_type.name not in _BLOCK_FORMATS:
            continue
        name = transformers_name(tensor.name)
        blocks[name] = np.ascontiguousarray(_in_our_order(tensor, tensor.data, rotated_heads))
        formats[name] = tensor.tensor_type.name
    return blocks, formats


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


def _in_our_order(tensor: ReaderTensor, rows: NDArray[Any], rotated_heads: dict[str, int]) -> NDArray[Any]:
    kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    return _halves_from_pairs(rows, rotated_heads[kind]) if kind in rotated_heads else rows


def _halves_from_pairs(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorders the rows of each head from (0, h, 1, h+1, ...) to (0, 1, ..., h, h+1, ...), which rotates by halves."""
    rows, *rest = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _architecture(model_type: str) -> str:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if model_type not in names:
        raise Incompatible(f"GGUF files of type {model_type!r} are not supported; supported: {', '.join(names)}")
    return f"{names[model_type]}ForCausalLM"


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
