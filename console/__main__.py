"""`python -m console [--server.port=8501 …]`: Streamlit's server, preloading what pages need.

Its flags are those of `streamlit run`. Without preloading, the first visitor would wait for a second of imports.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from pathlib import Path

from streamlit.web import cli

_NEEDED = ("pandas", "pyarrow", "console.app")  # Streamlit imports the first two with the first table or chart


def main() -> None:
    """Serves until told to stop."""
    threading.Thread(target=_load, name="load", daemon=True).start()
    sys.exit(cli.main(["run", str(Path(__file__).with_name("asgi.py")), *sys.argv[1:]], prog_name="python -m console"))


def _load() -> None:
    for name in _NEEDED:
        import_module(name)


if __name__ == "__main__":
    main()
