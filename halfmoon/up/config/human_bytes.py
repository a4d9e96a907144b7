"""Numbers of bytes as people write them."""

from __future__ import annotations


def human_bytes(value: int) -> str:
    """Exactly: 512MiB, or the number itself."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value and value % (1 << shift) == 0:
            return f"{value >> shift}{unit}"
    return str(value)
