"""Services that strangers could reach do not start, and say what to do, before they load anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.system import ROOT

OPTIONS = {
    "gateway": ("--cluster-listen", "0.0.0.0:0", "--model", "/nowhere"),
    "decode": ("--listen", "0.0.0.0:0", "--gateway", "127.0.0.1:1", "--model", "/nowhere"),
    "kvstore": ("--listen", "0.0.0.0:0"),
    "planner": ("--listen", "0.0.0.0:0", "--operator-token", "known"),
}


@pytest.mark.parametrize("service", sorted(OPTIONS))
def test_a_service_beyond_loopback_without_a_secret_ends_with_the_remedy(service: str) -> None:
    secrets = {"HALFMOON_CLUSTER_SECRET": "", "HALFMOON_CLUSTER_SECRET_FILE": ""}
    command = (sys.executable, "-m", f"services.{service}", *OPTIONS[service])
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **secrets}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    last = json.loads(ended.stderr.splitlines()[-1])
    assert last["event"] == "service.failed"
    assert "would let strangers call this service: set HALFMOON_CLUSTER_SECRET or" in last["reason"]
