"""Models whose packed weights are kept in a file: the first process of a host packs them, the others map the file.

A model asks for its matrices' packing always in the same order, so a file has them in this order, and behind them what
a packed model still has as plain tensors. Where a file cannot be had, a model is packed as without one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.checkpoint.converted import locked
from halfmoon.engine.models import Model
from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.linear import Multiply, PackWeight
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.native.weight_file import Memory, Part, WeightFile, WeightFiles
from halfmoon.freed_memory import give_back_freed_memory

logger = logging.getLogger(__name__)

_CODE = Path(__file__).parents[1] / "models"  # decides what is packed, in which order


@runtime_checkable
class PackedWeight(Protocol):
    """A `Multiply` over one piece of memory."""

    format_number: int
    shape: tuple[int, int]  # [out_features, in_features]
    memory: Memory

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Multiply`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How kernels pack. `identity`: equal where packed weights have equal bytes."""

    identity: str
    multiply: Callable[[int, tuple[int, int], Memory], Multiply | None]  # by format number; None: not of this size


Wrap = Callable[[PackWeight], PackWeight]


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """The steps from a checkpoint to a model that computes.

    build: an uninitialised model. load: fills it. load_shapes: only gives it its weights in blocks, without their
    bytes. pack: packs it with what its second argument makes of each `PackWeight`.
    """

    build: Callable[[], Model]
    load: Callable[[Model], None]
    load_shapes: Callable[[Model], None]
    pack: Callable[[Model, Wrap], None]


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Where one model's packed weights are kept, and how they are multiplied with."""

    files: WeightFiles
    key: str
    packing: Packing


def ready_model(steps: ModelSteps, kept: KeptWeights | None) -> Model:
    """A packed model, mapped if that is possible. The first process packs and keeps it, and maps it then, too."""
    try:
        return _ready_model(steps, kept)
    finally:
        give_back_freed_memory()  # weights as they were read, and before they were mapped


def _ready_model(steps: ModelSteps, kept: KeptWeights | None) -> Model:
    if kept is None:
        return _packed(steps, lambda pack_weight: pack_weight)
    if (model := _mapped(steps, kept)) is not None:
        return model
    with ExitStack() as stack:
        with suppress(OSError):  # a directory that cannot be written to
            stack.enter_context(locked(kept.files.lock_file(kept.key)))
        if (model := _mapped(steps, kept)) is not None:  # another process has just packed it
            return model
        recorded: list[Multiply | None] = []
        packed = _packed(steps, lambda pack_weight: partial(_record, recorded, pack_weight))
        is_kept = _keep(kept, recorded, packed)
    return (_mapped(steps, kept) if is_kept else None) or packed


def kept_weights(
    directory: Path, checkpoint: Checkpoint, dtype: torch.dtype, part: ModelPart | None, packing: Packing
) -> KeptWeights | None:
    """Where a model's packed weights are kept in `directory`; None, after a warning, if it cannot be used."""
    try:
        return KeptWeights(WeightFiles(directory), _weights_key(checkpoint, dtype, part, packing), packing)
    except OSError as error:
        logger.warning("weights.not_kept", extra={"reason": str(error)})
        return None


def _packed(steps: ModelSteps, wrap: Wrap) -> Model:
    model = steps.build()
    steps.load(model)
    steps.pack(model, wrap)
    return model


def _keep(kept: KeptWeights, recorded: list[Multiply | None], model: Model) -> bool:
    pieces: list[tuple[str, str, tuple[int, ...], Memory]] = []
    for weight in recorded:
        if not isinstance(weight, PackedWeight):
            return False  # packed by oneDNN, whose memory cannot be had
        pieces.append(("", str(weight.format_number), weight.shape, weight.memory))
    for name, view in _plain_tensors(model):
        memory = view.contiguous().view(-1).view(torch.uint8).numpy()
        pieces.append((name, str(view.dtype), tuple(view.shape), memory))
    try:
        is_kept = kept.files.write(kept.key, pieces)
        reason = "too little room on the device of the files"
    except OSError as error:
        is_kept, reason = False, str(error)
    if not is_kept:
        logger.warning("weights.not_kept", extra={"reason": reason})
    return is_kept


def _weights_key(checkpoint: Checkpoint, dtype: torch.dtype, part: ModelPart | None, packing: Packing) -> str:
    """Digest of all that decides a file's bytes: weights, their number format, this rank's part, kernels and code.

    A checkpoint's fingerprint has read a sample of each tensor, so its files' sizes and times are in here, too.
    """
    files = [*checkpoint.weight_files, *([checkpoint.block_file] if checkpoint.block_file else [])]
    facts = {
        "checkpoint": checkpoint.fingerprint,
        "files": [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "numbers": (str(dtype), checkpoint.quantization),
        "part": None if part is None else (*astuple(part.shard), part.tensor_rank, part.tensor_size),
        "packing": packing.identity,
        "code": (torch.__version__, *(_digest(file.read_bytes()) for file in sorted(_CODE.rglob("*.py")))),
    }
    return _digest(json.dumps(facts).encode())


def _record(recorded: list[Multiply | None], pack_weight: PackWeight, weight: Tensor | Blocks) -> Multiply | None:
    packed = pack_weight(weight)
    recorded.append(packed)
    return packed


def _mapped(steps: ModelSteps, kept: KeptWeights) -> Model | None:
    """A model with a file's weights; None if there is no file, or not what the model asks for."""
    file = kept.files.find(kept.key)
    if file is None:
        return None
    parts = iter(file.parts)

    def replayed(pack_weight: PackWeight) -> PackWeight:
        def next_packed(weight: Tensor | Blocks) -> Multiply | None:
            part = next(parts, None)
            if part is None or part.name or part.shape != tuple(weight.shape):
                raise _OtherModel
            packed = kept.packing.multiply(int(part.kind), (part.shape[0], part.shape[1]), file.memory(part))
            if packed is None:
                raise _OtherModel
            return packed

        return next_packed

    model = steps.build()
    try:
        steps.load_shapes(model)
        steps.pack(model, replayed)
        plain = {part.name: part for part in parts}
        for name, view in _plain_tensors(model):
            _copy(file, plain.pop(name, None), view)
        if plain:
            raise _OtherModel
    except _OtherModel:
        logger.warning("weights.not_mapped", extra={"reason": "a file has the weights of another model"})
        return None
    return model


class _OtherModel(Exception):
    """A file does not have what a model asks for."""


def _copy(file: WeightFile, part: Part | None, view: Tensor) -> None:
    is_same = part is not None and (part.kind, part.shape) == (str(view.dtype), tuple(view.shape))
    if part is None or not is_same or part.num_bytes != view.nbytes or not view.is_contiguous():
        raise _OtherModel
    memory = file.memory(part)
    ctypes.memmove(view.data_ptr(), memory.ctypes.data, memory.nbytes)


def _plain_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """What a packed model still has as tensors: norms, biases, tables and what is not multiplied by kernels."""
    return ((name, view) for name, view in model.parameters().items() if view.numel())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
