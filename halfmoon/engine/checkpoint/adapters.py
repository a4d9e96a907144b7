"""LoRA adapters on disk: small changes to a model's weights, each of which clients call by a model name. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.engine.checkpoint.checkpoint import read_json
from halfmoon.engine.checkpoint.converted import expanded
from halfmoon.errors import InvalidRequest, UnknownModel


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter in PEFT's format. `fingerprint`: 128 bits in hex, equal for equal files."""

    name: str
    path: Path
    fingerprint: str
    rank: int  # the largest of its layers


def read_adapters(written: Iterable[str]) -> tuple[Adapter, ...]:
    """Reads adapters that are written as NAME=PATH. Raises InvalidRequest and UnknownModel."""
    adapters: dict[str, Adapter] = {}
    for text in written:
        name, sign, path = text.partition("=")
        if not (name and sign and path):
            raise InvalidRequest(f"lora: {text!r} is not NAME=PATH, such as sql=/models/sql-adapter", param="lora")
        if name in adapters:
            raise InvalidRequest(f"lora: there are two adapters named {name!r}", param="lora")
        adapters[name] = _read(name, expanded(path, "lora").absolute())
    return tuple(adapters.values())


def _read(name: str, path: Path) -> Adapter:
    config_file, weights_file = path / "adapter_config.json", path / "adapter_model.safetensors"
    if not (os.path.isfile(config_file) and os.path.isfile(weights_file)):
        raise UnknownModel(
            f"lora: {path} has no adapter_config.json beside an adapter_model.safetensors, as PEFT saves them",
            param="lora",
        )
    rank = _largest_rank(config_file)
    hasher = hashlib.blake2b(digest_size=16)
    for file in (config_file, weights_file):
        with file.open("rb") as stream:
            hasher.update(hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).digest())
    return Adapter(name, path, hasher.hexdigest(), rank)


def _largest_rank(config_file: Path) -> int:
    """The largest rank of the layers: `r`, unless `rank_pattern` has another for some. Raises InvalidRequest."""
    config = read_json(config_file)
    pattern = config.get("rank_pattern")
    if not isinstance(pattern, dict | None):
        raise InvalidRequest(
            f"lora: {config_file}: rank_pattern must be an object with a rank for each layer, got {pattern!r}",
            param="lora",
        )
    ranks: dict[str, Any] = {"r": config.get("r")}
    ranks |= {f"rank_pattern.{layer}": rank for layer, rank in (pattern or {}).items()}
    for key, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank <= 0:
            raise InvalidRequest(
                f"lora: {config_file} has no rank above 0 in {key}, but {rank!r}: is it that of a LoRA adapter?",
                param="lora",
            )
    return int(max(ranks.values()))
