"""Fills a model from a checkpoint's safetensors, tensor by tensor, or with random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from halfmoon.engine.models import Model
from halfmoon.errors import Incompatible

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)

_DUMMY_SCALE = 0.02  # the initializer range of the supported architectures


@torch.no_grad()
def load_weights(model: Model, files: Iterable[Path], on_progress: Progress | None = None) -> None:
    """Streams `files` into `model`. Raises Incompatible for a missing, an unexpected or a misshapen tensor."""
    files = tuple(files)
    total_bytes = sum(file.stat().st_size for file in files)
    wanted = dict(model.parameters())
    done_bytes = 0
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                tensor = tensors.get_tensor(name)
                _fill(wanted, checkpoint_name(name), tensor)
                done_bytes += tensor.nbytes
                if on_progress is not None:
                    on_progress(min(done_bytes, total_bytes), total_bytes)
    if wanted:
        raise Incompatible(f"the checkpoint lacks {len(wanted)} tensors: {_some(wanted)}")


def checkpoint_name(name: str) -> str:
    """Adds the leading `model.` that base-model checkpoints omit; our names are the causal language model's."""
    if name.startswith(("model.", "lm_head.")):
        return name
    return f"model.{name}"


def is_superfluous(name: str) -> bool:
    """Whether `name` may be redundant in a checkpoint: a tied head stored twice, or a table that is computed."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _fill(wanted: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    view = wanted.pop(name, None)
    if view is None:
        if is_superfluous(name):
            return
        raise Incompatible(f"the checkpoint has a tensor this architecture does not know: {name}")
    if view.shape != tensor.shape:
        raise Incompatible(f"tensor {name} has shape {list(tensor.shape)}, the configuration says {list(view.shape)}")
    view.copy_(tensor)


def _some(names: Mapping[str, Tensor]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")


@torch.no_grad()
def fill_dummy_weights(model: Model) -> None:
    """Fills in random weights, the same in every process: right in shape and cost, meaningless in content."""
    for name, view in model.parameters().items():
        dummy_values(name, view)


def dummy_values(name: str, view: Tensor) -> Tensor:
    """Fills the whole tensor `name`; the same numbers in every process."""
    if "norm" in name:
        return view.fill_(0.0 if name.endswith(".bias") else 1.0)
    generator = torch.Generator(device=view.device).manual_seed(zlib.crc32(name.encode()))
    return view.normal_(0.0, _DUMMY_SCALE, generator=generator)
