"""`python -m halfmoon.engine.checkpoint.prepare MODEL [any]`: readies model and kernels on disk, in a killable process.

With `any`, a model that our own engine does not compute is not an error, and other engines can read its weights.

Prints one JSON object per line: `{"step": …}` before each slow step, at the end `{"path": …, "name": …}` or, with exit
status 1, `{"error": …}`.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.native.compiler import compiled
from halfmoon.errors import HalfmoonError, Incompatible


def main(model: str, engine: str = "own") -> int:
    """Returns the exit status."""
    try:
        checkpoint = prepare_checkpoint(
            model, on_progress=lambda step: _say(step=step), for_any_engine=engine == "any", as_numbers=engine == "any"
        )
        _compile_kernels()
    except HalfmoonError as error:
        _say(error=error.message)
        return 1
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:  # raised for broken model files
        _say(error=f"{model} cannot be read as a model: {type(error).__name__}: {error}")
        return 1
    _say(path=str(checkpoint.path), name=checkpoint.name)
    return 0


def _compile_kernels() -> None:
    """Compiles ahead for workers that start together. On failure, the worker that needs the kernels reports why."""
    with suppress(Incompatible):
        compiled(default_cache_dir(), lambda: _say(step="compiling the CPU kernels"))


def _say(**fields: str) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
