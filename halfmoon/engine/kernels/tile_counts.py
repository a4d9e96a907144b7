"""Tiles that cover a size, and what a size is padded to, for wrappers.

`triton.cdiv` and `triton.next_power_of_2` give the same, but are made for kernels: called from the host each takes 2
us, and a layer needs fourteen.
"""

from __future__ import annotations


def num_tiles(size: int, tile: int) -> int:
    """Tiles of `tile` that cover `size`."""
    return -(-size // tile)


def padded(size: int) -> int:
    """The power of two from `size` on, which is at least 1."""
    return 1 << (size - 1).bit_length()
