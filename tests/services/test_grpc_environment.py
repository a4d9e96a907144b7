"""gRPC is told how to behave before it is loaded, also in services that are started by hand."""

from __future__ import annotations

import os
import subprocess
import sys

SHOW = "import os, services; print(os.environ['GRPC_VERBOSITY'], os.environ['GRPC_ENABLE_FORK_SUPPORT'])"


def test_grpc_writes_no_plain_text_into_the_logs() -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    for given, expected in (({}, "ERROR 0"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG 0")):
        shown = subprocess.run([sys.executable, "-c", SHOW], env=bare | given, capture_output=True, check=True)
        assert shown.stdout.decode().strip() == expected
