"""Reads and checks single keys of a `config.json`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfmoon.errors import Incompatible

Raw = Mapping[str, Any]

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def required(raw: Raw, name: str) -> int:
    """A positive integer. Raises Incompatible for anything else."""
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Incompatible(f"config.json: {name} must be a positive integer, got {value!r}", param=name)
    return value


def refuse(raw: Raw, name: str, allowed: tuple[object, ...]) -> None:
    """Raises Incompatible if `name` is there with a value that is not allowed."""
    if name in raw and raw[name] not in allowed:
        raise Incompatible(f"config.json: {name}={raw[name]!r} is not supported; supported: {allowed}", param=name)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises Incompatible for heads that cannot share keys, or that cannot be rotated."""
    if num_heads % num_kv_heads:
        raise Incompatible(
            f"config.json: {num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads"
        )
    if head_dim % 2:
        raise Incompatible(f"config.json: rotary embedding needs an even head_dim, got {head_dim}", param="head_dim")


def rope_parameters(raw: Raw, theta: float = 10000.0, further: tuple[str, ...] = ()) -> dict[str, Any]:
    """Unifies three spellings: `rope_parameters` (transformers 5), `rope_scaling` with `rope_type` or with `type`.

    `further` types are supported besides those of every model. Raises Incompatible for others.
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or theta
    supported = (*_ROPE_TYPES, *further)
    if rope["rope_type"] not in supported:
        raise Incompatible(f"rope type {rope['rope_type']!r} is not supported; supported: {', '.join(supported)}")
    return rope


def refuse_partial_rotation(rope: Raw) -> None:
    """Raises Incompatible for heads of which only a part is rotated."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Incompatible("partial rotary embedding is not supported; supported: partial_rotary_factor 1")


def served_positions(max_positions: int, rope: Raw) -> int:
    """Positions that the rotary embedding serves."""
    if rope["rope_type"] == "yarn":
        original = int(rope.get("original_max_position_embeddings") or max_positions)
        return max(max_positions, int(original * float(rope.get("factor", 1.0))))
    return max_positions


def layer_windows(window: int | None, is_sliding: Sequence[bool], context_tokens: int) -> tuple[int | None, ...]:
    """Each layer's `ModelConfig.windows`; none at all where no sequence is longer than the window."""
    if window is None or window >= context_tokens or not any(is_sliding):
        return ()
    return tuple(window if sliding else None for sliding in is_sliding)


def sliding_layers(raw: Raw, num_layers: int, default: Sequence[bool]) -> Sequence[bool]:
    """Which layers slide: what `layer_types` says, else `default`. Raises Incompatible for other kinds of layers."""
    kinds = raw.get("layer_types")
    if not kinds:
        return default
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise Incompatible(
            f"config.json: layer_types names {len(kinds)} layers of {num_layers}, of the kinds {sorted(set(kinds))}; "
            "supported: full_attention and sliding_attention",
            param="layer_types",
        )
    return [kind == "sliding_attention" for kind in kinds]
