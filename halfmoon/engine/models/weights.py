"""Fills a model from a checkpoint's safetensors, tensor by tensor, from GGUF's blocks, or with random numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

import torch
from safetensors import safe_open
from torch import Tensor

from halfmoon.engine.models import Model
from halfmoon.engine.models.blocks import BlockFormat, Blocks
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.errors import Incompatible

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)

_FLOATS = ("F64", "F32", "F16", "BF16")
_DUMMY_SCALE = 0.02  # the initializer range of the supported architectures


@torch.no_grad()
def load_weights(
    model: Model,
    files: Iterable[Path],
    on_progress: Progress | None = None,
    blocks: Path | None = None,
    *,
    as_numbers: bool = False,
) -> None:
    """Streams `files` into `model`, but takes from the file `blocks` what is in there, in blocks or `as_numbers`.

    Raises Incompatible for a missing, an unexpected or a misshapen tensor, and for one that is not of plain numbers.
    """
    files = tuple(files)
    wanted = dict(model.parameters())
    taken = load_blocks(model, None if as_numbers else blocks, {name: tuple(wanted[name].shape) for name in wanted})
    in_blocks = names_in(blocks)
    total_bytes = sum(file.stat().st_size for file in (*files, *((blocks,) if blocks else ())))
    total_bytes -= sum(_repeated_bytes(file, in_blocks) for file in files if in_blocks)
    done_bytes = sum(taken.values())
    wanted = {name: view for name, view in wanted.items() if name not in taken}

    def fill(name: str, tensor: Tensor, num_bytes: int) -> None:
        nonlocal done_bytes
        _fill(wanted, name, tensor)
        done_bytes += num_bytes
        if on_progress is not None:
            on_progress(min(done_bytes, total_bytes), total_bytes)

    for name, stored in read_blocks(blocks, lambda name: not (name in taken or model.ignores(name))):
        fill(name, stored.numbers(()), stored.data.nbytes)
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if checkpoint_name(name) in in_blocks or model.ignores(checkpoint_name(name)):
                    continue
                if not is_superfluous(checkpoint_name(name)):
                    check_float(name, tensors.get_slice(name).get_dtype())
                tensor = tensors.get_tensor(name)
                fill(checkpoint_name(name), tensor, tensor.nbytes)
    if wanted:
        raise Incompatible(f"the checkpoint lacks {len(wanted)} tensors: {_some(wanted)}")


def load_blocks(
    model: Model,
    file: Path | None,
    shapes: Mapping[str, tuple[int, ...]],
    part: ModelPart | None = None,
    *,
    is_empty: bool = False,
) -> dict[str, int]:
    """Gives `model` the weights of `file` that it has in its `part`; returns the bytes of each.

    `shapes` are those of the whole model. `is_empty`: without the bytes, for a model that gets its packed weights from
    elsewhere. Raises Incompatible for a misshapen weight, and for one that cannot be cut.
    """
    taken: dict[str, int] = {}
    for name, stored in read_blocks(file, model.parameters().__contains__, is_empty=is_empty):
        if stored.shape != shapes[name]:
            raise Incompatible(
                f"tensor {name} has shape {list(stored.shape)}, the configuration says {list(shapes[name])}"
            )
        where = None if part is None else part.slices(name)
        own = stored if where is None else stored.cut(name, where)
        if model.put_blocks(name, own):
            taken[name] = own.data.nbytes
    return taken


def read_blocks(
    file: Path | None, is_wanted: Callable[[str], bool], *, is_empty: bool = False
) -> Iterator[tuple[str, Blocks]]:
    """The weights of `file`, whole and one at a time, under their names; `is_empty`: without their bytes."""
    if file is None:
        return
    with safe_open(str(file), framework="pt") as tensors:
        formats = tensors.metadata()
        for name in filter(is_wanted, tensors.keys()):
            if formats[name] not in get_args(BlockFormat):
                raise Incompatible(f"tensor {name} is in blocks of an unknown format, {formats[name]}")
            if is_empty:
                data = torch.empty(tensors.get_slice(name).get_shape(), dtype=torch.uint8, device="meta")
            else:
                data = tensors.get_tensor(name)
            yield name, Blocks(formats[name], data)


def names_in(file: Path | None) -> frozenset[str]:
    """The names of a safetensors file's tensors; none without a file."""
    if file is None:
        return frozenset()
    with safe_open(str(file), framework="pt") as tensors:
        return frozenset(tensors.keys())


def _repeated_bytes(file: Path, in_blocks: frozenset[str]) -> int:
    """Bytes of a file's tensors that are read from blocks instead; convert_gguf writes them in float32."""
    with safe_open(str(file), framework="pt") as tensors:
        repeated = [name for name in tensors.keys() if checkpoint_name(name) in in_blocks]  # noqa: SIM118
        return sum(4 * math.prod(tensors.get_slice(name).get_shape()) for name in repeated)


def load_block_shapes(model: Model, file: Path | None) -> None:
    """Gives `model` the weights that `load_weights` would take from `file`, without their bytes."""
    load_blocks(model, file, {name: tuple(view.shape) for name, view in model.parameters().items()}, is_empty=True)


def checkpoint_name(name: str) -> str:
    """Adds the leading `model.` that base-model checkpoints omit; our names are the causal language model's."""
    if name.startswith(("model.", "lm_head.")):
        return name
    return f"model.{name}"


def is_superfluous(name: str) -> bool:
    """Whether `name` may be redundant in a checkpoint: a tied head stored twice, or a table that is computed."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def check_float(name: str, dtype: str) -> None:
    """Raises Incompatible for numbers that are quantised or no weights; `dtype` is safetensors' name."""
    if dtype not in _FLOATS:
        raise Incompatible(f"tensor {name} is of dtype {dtype}; supported: {', '.join(_FLOATS)}")


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
