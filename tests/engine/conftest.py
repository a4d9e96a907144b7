"""Tiny random models in the formats of transformers, saved once a session; and the demo model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.errors import UnknownModel

VOCAB_SIZE = 199
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = {**_SMALL, "intermediate_size": 96, "num_key_value_heads": 2}
_WIDE: dict[str, Any] = {**_GATED, "intermediate_size": 128}  # gate and up in whole panels of the CPU kernels
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [4.0] * 8,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_DEEPSEEK: dict[str, Any] = {
    **_SMALL,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_DEEPSEEK_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_WIDE),
    "llama-tied-biased": lambda: LlamaConfig(**_WIDE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": lambda: LlamaConfig(**_GATED, rope_parameters=_LLAMA3),
    "llama-yarn-rope": lambda: LlamaConfig(**_GATED, rope_parameters=_YARN),
    "llama-linear-rope": lambda: LlamaConfig(
        **_GATED, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama-wide-heads": lambda: LlamaConfig(**_WIDE, head_dim=32),
    "mistral": lambda: MistralConfig(**_GATED, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**_GATED, sliding_window=21),
    "phi3": lambda: Phi3Config(**_GATED, sliding_window=37, rope_parameters=_PARTIAL),
    "phi3-longrope": lambda: Phi3Config(**_GATED, rope_parameters=_LONGROPE),
    "gemma2": lambda: Gemma2Config(
        **_GATED, head_dim=32, sliding_window=21, query_pre_attn_scalar=48, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GATED, head_dim=32, sliding_window=21, layer_types=_ALTERNATING),
    "gemma3-short": lambda: Gemma3TextConfig(**_GATED, head_dim=32, sliding_window=4096, layer_types=_ALTERNATING),
    "qwen2-windows": lambda: Qwen2Config(**_GATED, use_sliding_window=True, sliding_window=21, max_window_layers=1),
    "mixtral": lambda: MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_GATED,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_GATED, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True
    ),
    "deepseek-v2": lambda: DeepseekV2Config(
        **_DEEPSEEK,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_DEEPSEEK, q_lora_rank=40, first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=_DEEPSEEK_YARN
    ),
    "qwen2": lambda: Qwen2Config(**_WIDE),
    "qwen3": lambda: Qwen3Config(**_GATED, head_dim=32, tie_word_embeddings=True),
    "opt": lambda: OPTConfig(**_SMALL, ffn_dim=96, word_embed_proj_dim=64),
    "opt-norm-after": lambda: OPTConfig(**_SMALL, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False),
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """`tiny_checkpoint("qwen2")`: a saved model with weights large enough that a mistake shows in the logits."""
    made: dict[str, Checkpoint] = {}

    def make(name: str) -> Checkpoint:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            _random_model(CONFIGS[name]()).save_pretrained(path)
            made[name] = prepare_checkpoint(str(path))
        return made[name]

    return make


def _random_model(config: Any) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(7)
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("inv_freq"):
                continue
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15, generator=generator)
    return model


@pytest.fixture(scope="session")
def reference() -> Callable[[Checkpoint], PreTrainedModel]:
    """transformers' model of a checkpoint, in float32 with plain attention."""
    loaded: dict[Path, PreTrainedModel] = {}

    def load(checkpoint: Checkpoint) -> PreTrainedModel:
        if checkpoint.path not in loaded:
            loaded[checkpoint.path] = AutoModelForCausalLM.from_pretrained(
                checkpoint.path, dtype=torch.float32, attn_implementation="eager"
            )
        return loaded[checkpoint.path]

    return load


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    """SmolLM2-135M-Instruct, converted once into the user's cache."""
    try:
        return prepare_checkpoint("demo", as_numbers=True)
    except UnknownModel as error:
        pytest.skip(error.message)


@pytest.fixture
def make_engine(tiny_checkpoint: Callable[[str], Checkpoint]) -> Callable[..., Engine]:
    """`make_engine(num_blocks=8)`: a float32 engine of a tiny Llama with blocks of 8 tokens."""

    def make(model: str = "llama", **options: Any) -> Engine:
        settings: dict[str, Any] = {"dtype": "float32", "block_tokens": 8, "num_blocks": 64, "max_running": 8}
        return Engine(tiny_checkpoint(model), EngineConfig(**{**settings, **options}))

    return make
