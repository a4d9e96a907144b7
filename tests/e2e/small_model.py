"""A model that is there at once, for tests that ask nothing of what it says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def small_model(path: Path, config: PreTrainedConfig | None = None) -> Path:
    """The demo model's tokenizer, and two layers of random weights. It is called by the path's last part."""
    demo = Path(prepare_checkpoint("demo").path)
    torch.manual_seed(1)
    make: Any = AutoModelForCausalLM.from_config
    make(config or LlamaConfig(**SIZES), dtype=torch.float32).save_pretrained(path)
    for file in (*demo.glob("tokenizer*"), *demo.glob("*special_tokens*"), *demo.glob("chat_template*")):
        shutil.copy(file, path)
    return path
