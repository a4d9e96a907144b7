"""A test that hangs fails; what hangs on, whatever it does with the exception that tells it so, ends the suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HANGING = """
import time
from hypothesis import given, strategies

def test_hangs():
    time.sleep(600)

@given(strategies.integers())
def test_hangs_with_every_example(number):
    time.sleep(600)
"""


def test_examples_that_hang_end_the_suite(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-v", "-c", "pyproject.toml", "-p", "tests.conftest", "--timeout=1", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "test_hangs FAILED" in ended.stdout
    assert "in test_hangs_with_every_example\n    time.sleep(600)" in ended.stdout
