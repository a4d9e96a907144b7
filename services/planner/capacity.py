"""What fits in a device's memory: weights, KV blocks, and how many sequences of a given length run at once.

Arithmetic only. The memory for the runtime and activations is the caller's `reserved_share`, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from halfmoon.engine.model_config import ModelConfig
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVDtype, KVLayout
from services.planner.weights import device_share, num_parameters

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """One tensor-parallel group of equal devices that serves one model; weights and KV have the same dtype."""

    dtype: str
    memory_bytes: int  # of one device
    num_devices: int
    context_tokens: int  # of one sequence, prompt and output
    block_tokens: int = 64
    reserved_share: float = 0.1  # of memory, in [0, 1)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer. Bytes count one device; every device of the group holds the same."""

    weight_bytes: int
    kv_block_bytes: int
    num_blocks: int
    num_sequences: int
    explanation: str

    @property
    def fits(self) -> bool:
        """Whether at least one sequence can run."""
        return self.num_sequences > 0


def capacity(config: ModelConfig, question: CapacityQuestion) -> Capacity:
    """Computes what fits. Raises InvalidRequest, with `param`, for a question that makes no sense for this model."""
    _check(config, question)
    share = device_share(config, question.num_devices)
    dtype = cast(KVDtype, question.dtype)
    layout = KVLayout(config.num_layers, share.kv_heads, config.head_dim, dtype, question.block_tokens)
    weight_bytes = num_parameters(config, question.num_devices) * layout.item_bytes
    usable_bytes = int(question.memory_bytes * (1 - question.reserved_share))
    num_blocks = max(0, usable_bytes - weight_bytes) // layout.block_bytes
    num_sequences = num_blocks // layout.num_blocks(question.context_tokens)
    explanation = _explain(question, weight_bytes, layout, usable_bytes, num_blocks, num_sequences)
    return Capacity(weight_bytes, layout.block_bytes, num_blocks, num_sequences, explanation)


def _check(config: ModelConfig, question: CapacityQuestion) -> None:
    if question.dtype not in get_args(KVDtype):
        names = ", ".join(get_args(KVDtype))
        raise InvalidRequest(f"dtype {question.dtype!r} is not one of {names}", param="dtype")
    for name in ("memory_bytes", "num_devices", "context_tokens", "block_tokens"):
        if getattr(question, name) < 1:
            raise InvalidRequest(f"{name} must be at least 1", param=name)
    if not 0 <= question.reserved_share < 1:
        raise InvalidRequest(f"reserved_share must be in [0, 1), not {question.reserved_share}", param="reserved_share")
    if question.context_tokens > config.context_tokens:
        raise InvalidRequest(
            f"the model's context is {config.context_tokens} tokens, not {question.context_tokens}",
            param="context_tokens",
        )


def _explain(
    question: CapacityQuestion,
    weight_bytes: int,
    layout: KVLayout,
    usable_bytes: int,
    num_blocks: int,
    num_sequences: int,
) -> str:
    devices = "1 device" if question.num_devices == 1 else f"each of {question.num_devices} devices"
    have = f"{devices}: {_gib(usable_bytes)} of {_gib(question.memory_bytes)} usable, {_gib(weight_bytes)} of weights"
    if weight_bytes > usable_bytes:
        return f"Does not fit. On {have}: {_gib(weight_bytes - usable_bytes)} too much before any KV."
    per_sequence = layout.num_blocks(question.context_tokens)
    blocks = (
        f"{num_blocks} KV blocks of {layout.block_tokens} tokens ({layout.block_bytes / (1 << 20):.2f} MiB each); "
        f"a sequence of {question.context_tokens} tokens takes {per_sequence}"
    )
    if not num_sequences:
        return f"Does not fit. On {have}, room for {blocks}."
    return f"Fits {num_sequences} at once. On {have}, room for {blocks}."


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
