"""The parameter count against transformers' own models on the meta device, and against real safetensors headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from halfmoon.engine.model_config import ModelConfig, parse_model_config
from halfmoon.errors import InvalidRequest
from services.planner.weights import device_share, num_parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 101}
LLAMA = SMALL | {"intermediate_size": 80, "num_key_value_heads": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "llama tied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    "llama all biases": ("LlamaConfig", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("LlamaConfig", LLAMA | {"head_dim": 16}),
    "mistral": ("MistralConfig", LLAMA),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen3": ("Qwen3Config", LLAMA | {"head_dim": 32}),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "opt projected, norm after": (
        "OPTConfig",
        SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    ),
    "opt bare": (
        "OPTConfig",
        SMALL
        | {"ffn_dim": 96, "word_embed_proj_dim": 48, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "smollm2-135m": (
        "LlamaConfig",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    ),
    "llama-3-70b": (
        "LlamaConfig",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "opt-13b": (
        "OPTConfig",
        {"hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40}
        | {"word_embed_proj_dim": 5120, "vocab_size": 50272},
    ),
}


def meta_model(case: str) -> Any:
    class_name, fields = CASES[case]
    config = getattr(transformers, class_name)(**fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def parsed(case: str) -> ModelConfig:
    class_name, fields = CASES[case]
    return parse_model_config(getattr(transformers, class_name)(**fields).to_dict())


@pytest.mark.parametrize("case", CASES)
def test_the_count_is_that_of_the_reference_model(case: str) -> None:
    assert num_parameters(parsed(case)) == sum(parameter.numel() for parameter in meta_model(case).parameters())


@pytest.mark.parametrize("case", ["llama", "qwen3", "opt"])
def test_the_count_is_that_of_a_checkpoints_header(case: str, tmp_path: Path) -> None:
    parameters = dict(meta_model(case).named_parameters())
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(p.shape, dtype=torch.float16) for name, p in parameters.items()}, file)
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    num_bytes = sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in header.values())
    assert num_parameters(parsed(case)) * 2 == num_bytes


def config(heads: int, kv_heads: int, **fields: object) -> ModelConfig:
    raw = LLAMA | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return parse_model_config(raw | {"head_dim": 8} | fields)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "expected"),
    [(8, 8, 4, 2), (8, 2, 2, 1), (8, 2, 4, 1), (8, 2, 8, 1), (12, 3, 2, 3), (12, 6, 4, 6), (8, 1, 8, 1)],
)
def test_kv_heads_divide_or_are_held_by_several(heads: int, kv_heads: int, devices: int, expected: int) -> None:
    share = device_share(config(heads, kv_heads), devices)
    assert (share.q_heads, share.kv_heads) == (heads // devices, expected)


def test_query_heads_must_divide() -> None:
    with pytest.raises(InvalidRequest) as caught:
        device_share(config(9, 3), 2)
    assert caught.value.param == "num_devices"


def test_split_tensors_add_up_and_the_rest_is_on_every_device() -> None:
    """By hand: 2 devices of a model in which everything divides."""
    model = config(8, 4, vocab_size=100, intermediate_size=80, hidden_size=48)
    norms = 3 * 2 * 48 + 48
    assert 2 * num_parameters(model, 2) == num_parameters(model) + norms


def test_what_does_not_divide_is_rounded_up() -> None:
    share = device_share(config(8, 4, vocab_size=101, intermediate_size=81), 2)
    assert (share.vocab, share.intermediate) == (51, 41)
