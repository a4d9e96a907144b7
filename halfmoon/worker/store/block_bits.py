"""Sets of a prompt's blocks as the bits of one integer: a set of 10,000 blocks is cut and counted in a microsecond."""

from __future__ import annotations

from collections.abc import Collection


def bits_of(blocks: Collection[int]) -> int:
    """The set of these blocks."""
    flags = bytearray(b"0" * (max(blocks, default=0) + 1))
    for block in blocks:
        flags[-1 - block] = ord("1")
    return int(flags, 2)


def span(first: int, end: int) -> int:
    """The set of successive blocks."""
    return (1 << end) - (1 << first) if first < end else 0


def numbers_in(bits: int) -> list[int]:
    """The blocks of a set, in order."""
    return [block for block, flag in enumerate(reversed(f"{bits:b}")) if flag == "1"]


def nth_in(bits: int, number: int) -> int:
    """The block that is preceded by `number` others of the set."""
    low, high = 0, bits.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (bits & span(0, middle + 1)).bit_count() <= number:
            low = middle + 1
        else:
            high = middle
    return low
