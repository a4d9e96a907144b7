"""Compiles the C sources for this processor, once: the result's name says what it was compiled from."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from halfmoon.errors import Incompatible

_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-w", "-Wno-psabi")
_TIMEOUT_S = 300


def compiled(cache_dir: Path, on_compile: Callable[[], None] = lambda: None) -> Path:
    """The shared library in `cache_dir`/native, compiled if it is missing, after a call to `on_compile`.

    Compilers are tried in turn: one may be installed without its headers. Raises Incompatible if none succeeds.
    """
    commands = _compilers()
    targets = [cache_dir / "native" / f"kernels-{_fingerprint(command)}.so" for command in commands]
    for target in targets:
        if target.is_file():
            return target
    on_compile()
    failures = []
    for command, target in zip(commands, targets, strict=True):
        try:
            _compile(command, target)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            failures.append(f"by {' '.join(command)}: {output[-2000:]}")
        else:
            return target
    raise Incompatible("the CPU kernels could not be compiled " + "; ".join(failures))


def _compile(command: tuple[str, ...], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        arguments = [*command, *_flags(), str(_SOURCES / "kernels.c"), "-o", str(made), "-lm"]
        _run(arguments)
        made.replace(target)  # atomic: another worker may be looking for it


def _run(arguments: Sequence[str]) -> None:
    """Raises SubprocessError if it fails, or takes too long: then its own processes end with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, out, err)


def _flags() -> tuple[str, ...]:
    """clang 14 has no `-march=native` on ARM; elsewhere `-mcpu` only tunes."""
    return *_FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _compilers() -> list[tuple[str, ...]]:
    """`CC` alone, if it is set; else the C compilers on the path and the one in the `ziglang` package."""
    named = os.environ.get("CC", "").split()
    if named:
        return [tuple(named)]
    compilers: list[tuple[str, ...]] = [(name,) for name in ("cc", "gcc", "clang") if shutil.which(name) is not None]
    if find_spec("ziglang") is not None:
        compilers.append((sys.executable, "-m", "ziglang", "cc"))
    if not compilers:
        raise Incompatible("the CPU kernels need a C compiler: install gcc or clang, or `pip install ziglang`")
    return compilers


def _fingerprint(command: tuple[str, ...]) -> str:
    return _digest([sources_digest().encode(), " ".join(command).encode(), processor().encode()])


def sources_digest() -> str:
    """A name for what is compiled and how, but for the compiler."""
    return _digest([*(path.read_bytes() for path in sorted(_SOURCES.iterdir())), " ".join(_flags()).encode()])


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def processor() -> str:
    """The processor's name and instructions, a line each: what compiled code and its speed depend on.

    Machines may share a cache directory, and an emulated one shows its host's /proc/cpuinfo.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    lines = [line for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *lines])
