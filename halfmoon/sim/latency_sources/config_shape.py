"""A model's shape by its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon.architectures.config_json import parse_architecture
from halfmoon.architectures.weight_format import weight_format
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.sim.latency_sources.model_shape import ModelShape, shape_of


def shape_of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Raises Incompatible, or what Python raises for values of other kinds."""
    return shape_of(name, parse_architecture(config), weight_format(config.get("quantization_config")))


def read_shape(path: Path) -> ModelShape:
    """The shape in a file, named after its directory. Raises InvalidRequest."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="model") from error
    return parse_shape(text, path.resolve().parent.name, str(path))


def parse_shape(text: str, name: str, where: str) -> ModelShape:
    """The shape in a text, which came from `where`. Raises InvalidRequest."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        return shape_of_config(name, document)
    except Incompatible as error:
        raise InvalidRequest(f"{where} describes no model that is served: {error.message}", param="model") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise InvalidRequest(f"{where} describes no model that is served: {error}", param="model") from error
