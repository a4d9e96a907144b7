"""Reads and checks single keys of a `config.json`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from halfmoon.errors import Incompatible

Raw = Mapping[str, Any]

_MOST = (1 << 31) - 1  # of what is counted: sizes and positions
_MOST_LAYERS = 1 << 16  # each is described by itself
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_ROPE_NUMBERS: Mapping[str, bool] = MappingProxyType(
    {
        "rope_theta": False,
        "factor": False,
        "partial_rotary_factor": False,
        "attention_factor": False,
        "low_freq_factor": False,
        "high_freq_factor": False,
        "beta_fast": True,
        "beta_slow": True,
        "mscale": True,
        "mscale_all_dim": True,
    }
)
"""Numbers of rotary embeddings, each positive, or 0 where that is True."""
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
)
"""What transformers' rotary embedding of a type cannot do without."""


def required(raw: Raw, name: str) -> int:
    """A positive integer. Raises Incompatible for anything else."""
    if raw.get(name) is None:
        raise _wrong(name, "a positive integer", None)
    return count(raw, name, 1)


def num_layers_of(raw: Raw) -> int:
    """`num_hidden_layers`. Raises Incompatible for anything but 1 to 65,536."""
    layers = required(raw, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise _wrong("num_hidden_layers", f"at most {_MOST_LAYERS}", layers)
    return layers


def count(raw: Raw, name: str, default: int, *, least: int = 1, null: int | None = None) -> int:
    """An integer from `least` on; null means `null`, or what an absent one does. Raises Incompatible for others."""
    value = raw.get(name, default)
    if value is None:
        return default if null is None else null
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        kind = "a positive integer" if least == 1 else f"an integer from {least} on"
        raise _wrong(name, f"{kind}, at most {_MOST}" if _is_number(value) and value > _MOST else kind, value)
    return value


def number(raw: Raw, name: str, default: float, *, zero: bool = False, null: float | None = None) -> float:
    """A positive number, or `zero`; null means `null`, or what an absent one does. Raises Incompatible for others."""
    value = raw.get(name, default)
    if value is None:
        return default if null is None else null
    if not _is_number(value) or not (value > 0 or (zero and value == 0)) or value > 1e30:
        raise _wrong(name, "0 or a positive number" if zero else "a positive number", value)
    return float(value)


def flag(raw: Raw, name: str, default: bool) -> bool:
    """True or false; null is false. Raises Incompatible for others."""
    value = raw.get(name, default)
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise _wrong(name, "true or false", value)


def mapping(raw: Raw, name: str) -> Raw:
    """An object; null and an absent one are empty. Raises Incompatible for others."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    return value


def listed(raw: Raw, name: str, kind: type[int] | type[str] | type[float]) -> list[Any]:
    """A list of values of a kind, an integer being a float, too; null and an absent one are empty.

    Raises Incompatible for others.
    """
    value = raw.get(name)
    if value is None:
        return []
    fits = _is_number if kind is float else lambda entry: isinstance(entry, kind) and not isinstance(entry, bool)
    if not isinstance(value, list) or not all(fits(entry) for entry in value):
        words = {int: "integers", str: "texts", float: "numbers"}
        raise _wrong(name, f"a list of {words[kind]}", value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # but NaN


def _wrong(name: str, wanted: str, value: Any) -> Incompatible:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return Incompatible(f"config.json: {name} must be {wanted}, got {shown}", param=name)


def refuse(raw: Raw, name: str, allowed: tuple[object, ...]) -> None:
    """Raises Incompatible if `name` is there with a value that is not allowed."""
    if name in raw and raw[name] not in allowed:
        raise Incompatible(f"config.json: {name}={raw[name]!r} is not supported; supported: {allowed}", param=name)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises Incompatible for heads that cannot share keys, or that cannot be rotated."""
    if num_heads % num_kv_heads:
        raise Incompatible(
            f"config.json: {num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads "
            "(num_attention_heads, num_key_value_heads)",
            param="num_key_value_heads",
        )
    if head_dim < 1:
        raise Incompatible(
            f"config.json: hidden_size leaves nothing for each of {num_heads} attention heads (num_attention_heads); "
            "name a head_dim",
            param="num_attention_heads",
        )
    if head_dim % 2:
        raise Incompatible(f"config.json: rotary embedding needs an even head_dim, got {head_dim}", param="head_dim")


def rope_parameters(raw: Raw, theta: float = 10000.0, further: tuple[str, ...] = ()) -> dict[str, Any]:
    """Unifies three spellings: `rope_parameters` (transformers 5), `rope_scaling` with `rope_type` or with `type`.

    `further` types are supported besides those of every model. Raises Incompatible for others, and for one that
    lacks a number.
    """
    given = mapping(raw, "rope_parameters") or mapping(raw, "rope_scaling")
    rope = {name: value for name, value in given.items() if value is not None}  # which transformers would compute with
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope["rope_theta"] = number(rope, "rope_theta", number(raw, "rope_theta", theta))
    supported = (*_ROPE_TYPES, *further)
    if rope["rope_type"] not in supported:
        raise Incompatible(
            f"config.json: rope_type {rope['rope_type']!r} is not supported; supported: {', '.join(supported)}",
            param="rope_type",
        )
    if rope["rope_theta"] <= 1:
        raise _wrong("rope_theta", "above 1", rope["rope_theta"])
    for name in rope.keys() & _ROPE_NUMBERS.keys():
        number(rope, name, 1.0, zero=_ROPE_NUMBERS[name])
    count(rope, "original_max_position_embeddings", 1)
    for name in _ROPE_NEEDS.get(rope["rope_type"], ()):
        if rope.get(name) is None:
            raise Incompatible(f"config.json: rope_type {rope['rope_type']} needs {name}", param=name)
    if rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise _wrong("low_freq_factor", f"below high_freq_factor, {rope['high_freq_factor']}", rope["low_freq_factor"])
    return rope


def refuse_partial_rotation(rope: Raw) -> None:
    """Raises Incompatible for heads of which only a part is rotated."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Incompatible(
            "config.json: partial rotary embedding is not supported; supported: partial_rotary_factor 1",
            param="partial_rotary_factor",
        )


def served_positions(max_positions: int, rope: Raw) -> int:
    """Positions that the rotary embedding serves. Raises Incompatible for more than can be counted."""
    if rope["rope_type"] != "yarn":
        return max_positions
    positions = count(rope, "original_max_position_embeddings", max_positions) * number(rope, "factor", 1.0)
    if positions > _MOST:
        raise _wrong("factor", f"at most {_MOST} by original_max_position_embeddings", rope["factor"])
    return max(max_positions, int(positions))


def layer_windows(window: int | None, is_sliding: Sequence[bool], context_tokens: int) -> tuple[int | None, ...]:
    """Each layer's `ModelConfig.windows`; none at all where no sequence is longer than the window."""
    if window is None or window >= context_tokens or not any(is_sliding):
        return ()
    return tuple(window if sliding else None for sliding in is_sliding)


def sliding_layers(raw: Raw, num_layers: int, default: Sequence[bool]) -> Sequence[bool]:
    """Which layers slide: what `layer_types` says, else `default`. Raises Incompatible for other kinds of layers."""
    kinds = listed(raw, "layer_types", str)
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
