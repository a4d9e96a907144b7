"""Reads a model's configuration without its weights."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download

from halfmoon.engine.checkpoint import DEMO_MODEL, prepare_checkpoint
from halfmoon.engine.model_config import ModelConfig, parse_model_config
from halfmoon.errors import UnknownModel


def read_model_config(model: str) -> ModelConfig:
    """Reads the configuration of a model; blocks.

    model: `demo`, a directory, a `.gguf` file or a Hugging Face id, of which only `config.json` is fetched. Raises
    UnknownModel or InvalidRequest if there is no such model, Incompatible if we cannot serve it.
    """
    path = Path(model).expanduser()
    if model == DEMO_MODEL or path.is_dir() or path.suffix == ".gguf":
        return prepare_checkpoint(model).model_config
    try:
        file = hf_hub_download(model, "config.json")
    except (OSError, ValueError, RuntimeError) as err:  # offline, absent, gated, or not an id
        raise UnknownModel(
            f"{model!r} is not a directory or .gguf file on the planner's host, and Hugging Face did not give its "
            f"config.json ({type(err).__name__})",
            param="model",
        ) from err
    return parse_model_config(json.loads(Path(file).read_text()))
