"""A test that hangs fails; what hangs on, whatever it does with the exception that tells it so, ends the suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HANGING = """
import time
from hypothesis import given, strategies

def test_hangs():
    time.sleep(600)

@given(strategies.integers())
def test_hangs_with_every_example(number):
    time.sleep(600)

def test_later():
    pass
"""


IN_WORKERS = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")


@pytest.mark.parametrize("more", [("-n", "0"), IN_WORKERS], ids=["alone", "workers"])
def test_examples_that_hang_end_the_suite(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-v", "-c", "pyproject.toml", "-p", "tests.conftest", "--timeout=1", *more, str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert re.search(r"test_hangs FAILED|FAILED \S+::test_hangs ", ended.stdout)
    assert "in test_hangs_with_every_example\n    time.sleep(600)" in ended.stdout
    assert "test_later" not in ended.stdout
