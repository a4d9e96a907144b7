"""`python -m halfmoon.engine.prepare MODEL`: makes a model ready on disk, as a process that can be killed.

Prints one JSON object a line: `{"step": …}` before each slow step, at the end `{"path": …, "name": …}` or, with exit
status 1, `{"error": …}`.
"""

from __future__ import annotations

import json
import sys

from halfmoon.engine.checkpoint import prepare_checkpoint
from halfmoon.errors import HalfmoonError


def main(model: str) -> int:
    """The exit status."""
    try:
        checkpoint = prepare_checkpoint(model, on_progress=lambda step: _say(step=step))
    except HalfmoonError as error:
        _say(error=error.message)
        return 1
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:  # what broken model files cause
        _say(error=f"{model} cannot be read as a model: {type(error).__name__}: {error}")
        return 1
    _say(path=str(checkpoint.path), name=checkpoint.name)
    return 0


def _say(**fields: str) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
