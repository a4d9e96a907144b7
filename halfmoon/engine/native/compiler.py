"""Compiles the C sources for this processor, once: the result is kept under a name that says what it was made from."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from halfmoon.errors import Incompatible

_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w", "-Wno-psabi")
_TIMEOUT_S = 300


def compiled(cache_dir: Path, on_compile: Callable[[], None] = lambda: None) -> Path:
    """The shared library in `cache_dir`/native, compiled if it is not there, which `on_compile` hears of first.

    Raises Incompatible without a compiler or a place for what it makes.
    """
    command = _compiler()
    target = cache_dir / "native" / f"kernels-{_fingerprint(command)}.so"
    if target.is_file():
        return target
    on_compile()
    try:
        _compile(command, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Incompatible(f"the CPU kernels could not be compiled: {error}") from error
    return target


def _compile(command: tuple[str, ...], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        arguments = [*command, *_FLAGS, str(_SOURCES / "kernels.c"), "-o", str(made), "-lm"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise Incompatible(f"the CPU kernels could not be compiled by {command[0]}: {done.stderr[-2000:]}")
        made.replace(target)  # at once: another worker may be looking for it


def _compiler() -> tuple[str, ...]:
    """`CC`, else a C compiler on the path, else the one in the `ziglang` package."""
    named = os.environ.get("CC", "").split()
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]) is not None:
            return tuple(command)
    if find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise Incompatible("the CPU kernels need a C compiler: install gcc or clang, or `pip install ziglang`")


def _fingerprint(command: tuple[str, ...]) -> str:
    parts = [path.read_bytes() for path in sorted(_SOURCES.iterdir())]
    parts += [" ".join((*command, *_FLAGS)).encode(), _processor().encode()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _processor() -> str:
    """What `-march=native` depends on: a cache directory may be shared between machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = [line for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if line.startswith(wanted)]
    return "\n".join(lines)
