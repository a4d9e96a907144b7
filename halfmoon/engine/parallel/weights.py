"""Fills one rank's part of a model: reads only that part's slices from the checkpoint's safetensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.models.weights import (
    Progress,
    check_float,
    checkpoint_name,
    dummy_values,
    is_superfluous,
    load_blocks,
    names_in,
    read_blocks,
)
from halfmoon.errors import Incompatible


@torch.no_grad()
def load_part(
    model: Model,
    part: ModelPart,
    files: Iterable[Path],
    on_progress: Progress | None = None,
    blocks: Path | None = None,
    *,
    as_numbers: bool = False,
) -> None:
    """Streams `part`'s slices into `model`, reporting its own bytes to `on_progress`; see `load_weights`.

    Raises Incompatible, like `load_weights`, for a missing, an unexpected or a misshapen tensor.
    """
    shapes = _whole_shapes(part)
    wanted = dict(model.parameters())
    taken = load_blocks(model, None if as_numbers else blocks, shapes, part)
    wanted = {name: view for name, view in wanted.items() if name not in taken}
    total_bytes, done_bytes = sum(view.nbytes for view in wanted.values()) + sum(taken.values()), sum(taken.values())

    def fill(name: str, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        nonlocal done_bytes
        view = wanted.pop(name)
        _fill(view, read, part.pieces(name))
        done_bytes += view.nbytes
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)

    def is_unread(name: str) -> bool:
        return name in wanted or not (name in shapes or model.ignores(name))

    in_blocks = names_in(blocks)
    for name, stored in read_blocks(blocks, is_unread):
        if _is_known(name, stored.shape, shapes):
            fill(name, stored.numbers)
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                ours, source = checkpoint_name(name), tensors.get_slice(name)
                if ours in in_blocks or model.ignores(ours):
                    continue
                if _is_known(ours, tuple(source.get_shape()), shapes) and ours in wanted:
                    check_float(name, source.get_dtype())
                    fill(ours, source.__getitem__)
    if wanted:
        raise Incompatible(f"the checkpoint lacks {len(wanted)} tensors: {', '.join(sorted(wanted)[:3])}")


def load_part_shapes(model: Model, part: ModelPart, blocks: Path | None) -> None:
    """Gives `model` the weights that `load_part` would, of those in blocks, without their bytes."""
    if blocks is not None:
        load_blocks(model, blocks, _whole_shapes(part), part, is_empty=True)


@torch.no_grad()
def fill_dummy_part(model: Model, part: ModelPart) -> None:
    """Fills in slices of `fill_dummy_weights`' numbers, so that every grid has the same model."""
    shapes = _whole_shapes(part)
    for name, view in model.parameters().items():
        whole = dummy_values(name, torch.empty(shapes[name], dtype=view.dtype, device=view.device))
        _fill(view, whole.__getitem__, part.pieces(name))


def _whole_shapes(part: ModelPart) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole model's tensors by name, from a model that takes no memory."""
    whole = build_model(part.whole, torch.float32, "meta")
    return {name: tuple(view.shape) for name, view in whole.parameters().items()}


def _is_known(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if name not in shapes:
        if is_superfluous(name):
            return False
        raise Incompatible(f"the checkpoint has a tensor this architecture does not know: {name}")
    if shapes[name] != shape:
        raise Incompatible(f"tensor {name} has shape {list(shape)}, the configuration says {list(shapes[name])}")
    return True


def _fill(view: Tensor, read: Callable[[tuple[slice, ...]], Tensor], pieces: tuple[tuple[slice, ...], ...]) -> None:
    if not pieces:
        view.zero_()
        return
    values = torch.cat([read(where) for where in pieces]) if len(pieces) > 1 else read(pieces[0])
    assert math.prod(values.shape) == view.numel(), "the part's rules and its tensors disagree"
    view.copy_(values)
