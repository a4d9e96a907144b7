"""Programs that services start: nothing of gRPC runs in them before they are programs."""

from __future__ import annotations

import os
import subprocess
import sys

_CODE = "import os, sys, services; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], 'grpc' in sys.modules)"


def test_forks_are_none_of_grpcs_business_before_a_service_loads_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    found = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.split() == ["0", "False"]
