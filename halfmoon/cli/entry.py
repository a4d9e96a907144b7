"""Where the `halfmoon` command begins: Ctrl-C while its modules are still being imported ends it in silence."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command."""
    try:
        from halfmoon.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    app()
