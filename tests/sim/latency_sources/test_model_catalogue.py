"""Models by their config.json: what is planned for is what workers serve, and no other shape passes for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfmoon.engine.checkpoint.model_config import parse_model_config
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.sim.latency_sources.model_catalogue import MODELS, SERVED, model_shape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def written(path: Path, **changed: Any) -> str:
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in (LLAMA | changed).items() if value is not None})
    )
    return str(path)


def test_a_config_has_the_cost_of_the_known_model(tmp_path: Path) -> None:
    found, known = model_shape(written(tmp_path)), MODELS["llama-3-8b"]
    assert (found.weight_bytes, found.kv_bytes_per_token, found.context_tokens) == (
        known.weight_bytes,
        known.kv_bytes_per_token,
        known.context_tokens,
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256}, "DeepseekV3ForCausalLM; served are"),
        ({"architectures": None, "model_type": "minicpm3"}, "it is of minicpm3"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": None, "model_type": None, "kv_lora_rank": 512}, "latent attention"),
        ({"architectures": None, "model_type": None, "num_local_experts": 8}, "mixtures of experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"num_key_value_heads": 5}, "not a multiple of 5"),
        ({"num_attention_heads": True}, "whole number"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_what_is_not_served_is_not_planned_for(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        model_shape(written(tmp_path, **changed))


@pytest.mark.parametrize("model_type", [*SERVED, "deepseek_v3", "mixtral", "gemma2", "t5"])
def test_planner_and_engine_take_the_same_architectures(tmp_path: Path, model_type: str) -> None:
    opt = {"ffn_dim": 64, "max_position_embeddings": 64} if model_type == "opt" else {}
    path = written(tmp_path, architectures=None, model_type=model_type, **opt)
    try:
        parse_model_config(json.loads((tmp_path / "config.json").read_text()))
        is_served = True
    except HalfmoonError:
        is_served = False
    if is_served:
        assert model_shape(path).num_layers == 32
    else:
        with pytest.raises(InvalidRequest, match="served are"):
            model_shape(path)
