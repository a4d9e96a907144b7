"""Models by their config.json: what is planned for is what workers serve, and no other shape passes for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon.architectures.config_json import FAMILIES, parse_model_config
from halfmoon.engine.parallel.grid import Grid
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.sim.latency_sources.model_catalogue import MODELS, model_shape

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
        ({"architectures": None, "model_type": "minicpm3"}, "architecture 'minicpm3' is not supported"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": None, "model_type": None}, "architecture 'None' is not supported"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantised by 'magic' are not known"),
        ({"quantization_config": {"quant_method": "awq", "bits": "four"}}, "bits of quantization_config must be"),
        ({"quantization_config": ["fp8"]}, "quantization_config must be an object"),
        ({"num_key_value_heads": 5}, "not a multiple of 5"),
        ({"num_attention_heads": True}, "positive integer"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"model_type": "mixtral", "architectures": None, "num_experts_per_tok": 9}, "9 experts cannot be chosen of 8"),
    ],
)
def test_what_is_not_served_is_not_planned_for(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        model_shape(written(tmp_path, **changed))


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_planner_and_engine_take_the_same_architectures(tmp_path: Path, family: str) -> None:
    more = {"ffn_dim": 64, "max_position_embeddings": 64} if family == "opt" else {}
    path = written(tmp_path, architectures=None, model_type=family, **more)
    raw = json.loads((tmp_path / "config.json").read_text())
    if family == "t5":
        with pytest.raises(Incompatible):
            parse_model_config(raw)
        with pytest.raises(InvalidRequest, match="'t5' is not supported"):
            model_shape(path)
        return
    config, shape = parse_model_config(raw), model_shape(path)
    assert (shape.num_layers, shape.context_tokens) == (config.num_layers, config.context_tokens)
    assert (shape.experts, shape.latent, shape.windows) == (config.experts, config.latent, config.windows)
    for tensor in (2, 3, 8, 64):
        assert starts(Grid(tensor, 1).check, config) == starts(shape.check, tensor, 1)


def starts(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except Incompatible:
        return False
    return True


def test_quantised_checkpoints_are_planned_and_not_computed_by_our_engine(tmp_path: Path) -> None:
    path = written(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    with pytest.raises(Incompatible, match=r"quantised \(awq\)"):
        parse_model_config(json.loads((tmp_path / "config.json").read_text()))
    found, known = model_shape(path), MODELS["llama-3-8b"]
    heads_bytes = 2 * known.head_params * 2
    share = (found.weight_bytes - heads_bytes) / (known.weight_bytes - heads_bytes)
    assert share == pytest.approx((4 + 20 / 128) / 16)
    assert found.kv_bytes_per_token == known.kv_bytes_per_token
