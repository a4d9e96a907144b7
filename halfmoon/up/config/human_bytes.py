"""Formats numbers of bytes."""

from __future__ import annotations


def human_bytes(value: int) -> str:
    """Formats a size exactly: with a unit, such as 512MiB, or as the plain number."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value and value % (1 << shift) == 0:
            return f"{value >> shift}{unit}"
    return str(value)
