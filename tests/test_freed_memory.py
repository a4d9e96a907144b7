"""What glibc does with freed memory; in processes of their own, since its options cannot be taken back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def printed(code: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_glibc_takes_the_options() -> None:
    assert printed("from halfmoon.freed_memory import keep_freed_memory; print(int(keep_freed_memory()))") == [1]


def test_pieces_between_what_is_in_use_are_given_back() -> None:
    code = """
from pathlib import Path
from halfmoon.freed_memory import give_back_freed_memory, keep_freed_memory

def resident_kb():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

keep_freed_memory()
pieces = [bytes(1_000_000) for _ in range(400)]
pieces = [bytes(piece) for piece in map(bytearray, pieces)]  # their pages are there
del pieces[::2]
before = resident_kb()
give_back_freed_memory()
print(before, resident_kb())
"""
    before, after = printed(code)
    assert before - after > 150_000
