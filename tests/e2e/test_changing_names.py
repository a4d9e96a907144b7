"""Discovery by a DNS name whose addresses change while the system runs, in a network namespace with a name server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.system import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROGRAM = 'ip link set lo up && mount --bind "$1" /etc/resolv.conf && exec "$2" -m tests.e2e.changing_names "$3"'


def test_workers_follow_a_name_whose_addresses_change(tmp_path: Path) -> None:
    alone = ["unshare", "--net", "--mount"]
    if os.geteuid() or subprocess.run([*alone, "ip", "link", "set", "lo", "up"], check=False).returncode:
        pytest.skip("needs root, and unshare with a network of its own")
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\n")
    command = [*alone, "bash", "-euc", PROGRAM, "bash", str(resolver), sys.executable, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
