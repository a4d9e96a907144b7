"""Which releases of vLLM the connector was written for and tested with. No vLLM at import."""

from __future__ import annotations

from importlib.util import find_spec

from halfmoon.errors import Incompatible

FIRST, BEFORE = (0, 32), (0, 33)  # a release below the second


def check_vllm() -> None:
    """Raises Incompatible unless this interpreter has a vLLM that the connector knows."""
    if find_spec("vllm") is None:
        raise Incompatible(
            "this interpreter has no vLLM: name one that has, with halfmoon installed beside it, by --engine-python",
            param="engine",
        )
    import vllm

    check_release(vllm.__version__)


def check_release(version: str) -> None:
    """Raises Incompatible for a version outside the range."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not FIRST <= numbers < BEFORE:
        wanted = f"{_text(FIRST)} or later, below {_text(BEFORE)}"
        raise Incompatible(f"vLLM is {version}; this release of Halfmoon works with {wanted}", param="engine")


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
